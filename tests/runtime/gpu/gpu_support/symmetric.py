"""Symmetric memory of ranks without GPUs: PyTorch's functions and operators, whose kernels exchange over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from gpu_support.fake_driver import FakeDriver
from gpu_support.pretended import PretendedDevice, PretendedTensor
from gpu_support.pretended_ranks import PretendedCollectives, exchange
from torch import Tensor

from megatron_runtime.gpu import peers
from megatron_runtime.parallel import symmetric_memory
from megatron_runtime.parallel.symmetric_memory import open_symmetric_sums

GPUS = 8


class FakeSymmetricMemory:
    """Stands for ``torch.distributed._symmetric_memory`` and ``torch.ops.symm_mem``, with the checks of both."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        """Operators, with the bytes of their sums."""
        self.failure: RuntimeError | None = None
        """What a rendezvous raises."""
        self._shared: set[tuple[int, str]] = set()

    @property
    def library(self) -> Any:
        """As from `symmetric_memory.import_symmetric_memory`."""
        return SimpleNamespace(memory=self, operations=self)

    # The module's functions.

    def empty(self, *size: Any, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        """Memory that can be shared."""
        assert device is not None
        assert device.type == "cuda"
        return self.allocate(*size, dtype=dtype, device=device)

    def allocate(self, *size: Any, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """On the host."""
        del device
        return torch.empty(*size, dtype=dtype)

    def rendezvous(self, tensor: Tensor, group: str) -> None:
        """Share it with the same of all ranks of the group."""
        if self.failure is not None:
            raise self.failure
        self._shared.add((_content(tensor).untyped_storage().data_ptr(), group))

    # The operators.

    def one_shot_all_reduce_out(self, input: Tensor, reduce_op: str, group_name: str, out: Tensor) -> Tensor:
        """The sum in another tensor."""
        return self._sum("one_shot", input, reduce_op, group_name, out)

    def two_shot_all_reduce_out(self, input: Tensor, reduce_op: str, group_name: str, output: Tensor) -> Tensor:
        """The same; overwrites a part of the input."""
        assert _group(group_name).size() in (2, 4, 8), "Not implemented for world_size"
        return self._sum("two_shot", input, reduce_op, group_name, output)

    def _sum(self, name: str, given: Tensor, reduce_op: str, group_name: str, out: Tensor) -> Tensor:
        shared, target = _content(given), _content(out)
        num_bytes = shared.numel() * shared.element_size()
        assert reduce_op == "sum", "only sum is supported for now"
        assert shared.is_contiguous()
        assert target.is_contiguous()
        assert shared.shape == target.shape, "input/output size mismatch"
        assert shared.dtype is target.dtype
        assert shared.dtype in (torch.float32, torch.bfloat16)
        assert (shared.untyped_storage().data_ptr(), group_name) in self._shared, "input must be allocated with empty"
        assert num_bytes % max(4, shared.element_size()) == 0, "input size must be aligned"
        assert target.data_ptr() % 16 == 0, "the kernels write vectors"
        self.calls.append((name, num_bytes))
        self.launch(out, lambda: self._exchange(shared, target, group_name))
        return out

    def launch(self, out: Tensor, work: Callable[[], None]) -> None:
        """Do what a kernel does."""
        del out
        work()

    def _exchange(self, shared: Tensor, target: Tensor, group_name: str) -> None:
        group = _group(group_name)
        parts = [torch.empty_like(shared) for _ in range(group.size())]
        dist.all_gather(parts, shared.clone(), group=group)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        target.copy_(total)
        shared.fill_(torch.nan)


class PretendedSymmetricMemory(FakeSymmetricMemory):
    """Whose kernels are launches on the pretended device."""

    device: PretendedDevice

    def use_device(self, device: PretendedDevice) -> None:
        """The one of this rank."""
        self.device = device

    def allocate(self, *size: Any, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """On the device."""
        return PretendedTensor(super().allocate(*size, dtype=dtype, device=device), self.device)

    def launch(self, out: Tensor, work: Callable[[], None]) -> None:
        """Which graphs capture."""
        assert isinstance(out, PretendedTensor)
        out.device_.changed(lambda: exchange(self.device, work))


class SymmetricCollectives(PretendedCollectives):
    """With sums over symmetric memory on the pretended device."""

    @classmethod
    def open_sums(cls, position: Any, groups: Any, share: Any) -> Any:
        """As on a machine with a GPU for each rank."""
        return open_symmetric_sums(position, groups, torch.device("cuda", position.rank), share)


@contextmanager
def machine_with_gpus(rank: int, fake: FakeSymmetricMemory, driver: FakeDriver | None = None) -> Iterator[None]:
    """A process that sees 8 GPUs with links between all, of which it has that of its rank."""
    driver = driver or FakeDriver(ordinal=rank, linked=set(range(GPUS)) - {rank})
    functions = {
        "device_count": lambda: GPUS,
        "get_device_properties": lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"),
        "can_device_access_peer": lambda one, other: one != other,
        "get_device_capability": lambda _: (9, 0),
    }
    with (
        patch.multiple(torch.cuda, **functions),
        patch.object(peers, "import_driver", lambda: driver),
        patch.object(symmetric_memory, "import_symmetric_memory", lambda: fake.library),
    ):
        yield


def _content(tensor: Tensor) -> Tensor:
    return tensor.content if isinstance(tensor, PretendedTensor) else tensor


def _group(name: str) -> dist.ProcessGroup:
    found: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return found
