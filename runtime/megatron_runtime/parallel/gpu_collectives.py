"""Sums and gathers of tensors on GPUs, by NCCL, and sums within a machine by symmetric memory.

Each operation is a launch on the current stream, which CUDA graphs can capture. The host does not wait for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_runtime.parallel.process_groups import ProcessGroups
from megatron_runtime.parallel.symmetric_memory import SymmetricSums

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_NO_HANDLING = "0"
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The second is its name before PyTorch 2.13."""


class GpuCollectives:
    """The `Collectives` of GPUs.

    Logits go to all ranks: each samples the same token with the same kernels, and begins the next pass with it, without
    a message by way of the host.

    Args:
        groups: The process groups.
        device: The GPU of this rank.
        symmetric: Sums over symmetric memory, by process group.
    """

    only_begins = True
    gathers_to_all = True

    def __init__(
        self,
        groups: ProcessGroups,
        device: torch.device,
        symmetric: Mapping[dist.ProcessGroup, SymmetricSums] | None = None,
    ) -> None:
        self._groups = groups
        self._device = device
        self._symmetric = symmetric or {}

    @property
    def can_abort(self) -> bool:
        """As in Collectives: nothing ends kernels that poll symmetric memory."""
        return not self._symmetric

    @property
    def adds_up_in_order(self) -> bool:
        """As in Collectives."""
        return bool(self._symmetric)

    def sum(self, part: Tensor) -> Tensor:
        """As in Collectives."""
        return self._all_reduce(part, self._groups.tensor)

    def memory_for_part(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """As in Collectives."""
        symmetric = self._symmetric.get(self._groups.tensor)
        return None if symmetric is None else symmetric.memory_for(shape, dtype)

    def sum_experts(self, part: Tensor) -> Tensor:
        """As in Collectives."""
        return self._all_reduce(part, self._groups.expert)

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """As in Collectives; NCCL gathers parts of equal widths, the widest one's."""
        rows, widest = len(part), max(widths)
        if part.shape[1] < widest:
            narrow, part = part, part.new_empty(rows, widest)  # What is beyond it is cut off again.
            part[:, : narrow.shape[1]].copy_(narrow)
        flat = part.new_empty(len(widths) * rows, widest)
        self._all_gather(flat, part.contiguous())
        gathered = flat.view(len(widths), rows, widest)
        if min(widths) < widest:
            return torch.cat([gathered[rank, :, :width] for rank, width in enumerate(widths)], dim=1).float()
        logits = torch.empty(rows, len(widths), widest, dtype=torch.float32, device=part.device)
        return logits.copy_(gathered.transpose(0, 1)).view(rows, sum(widths))

    def abort(self) -> None:
        """As in Collectives. All communicators at once, each in a thread: an abort frees memory, which waits for the
        device, and so for what another communicator has begun.
        """
        backends = (group._get_backend(self._device) for group in self._groups.of_tensors)
        aborts = [threading.Thread(target=self._abort, args=(backend,), daemon=True) for backend in backends]
        for abort in aborts:
            abort.start()
        for abort in aborts:
            abort.join()

    def _abort(self, backend: Any) -> None:
        with torch.cuda.device(self._device):  # of this thread
            backend.abort()

    def close(self) -> None:
        """Does nothing."""

    def _all_reduce(self, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The sum of the parts of all ranks of the group: the one place that chooses how."""
        symmetric = self._symmetric.get(group)
        if symmetric is not None and symmetric.fits(part.shape, part.dtype):
            return symmetric.add_up(part)
        self._reduce_by_nccl(part, group)
        return part

    def _reduce_by_nccl(self, part: Tensor, group: dist.ProcessGroup) -> None:
        dist.all_reduce(part, group=group)

    def _all_gather(self, gathered: Tensor, part: Tensor) -> None:
        """The parts of all ranks of a layer, one below the other."""
        _all_gather(gathered, part, group=self._groups.tensor)


@contextmanager
def without_error_handling() -> Iterator[None]:
    """Process groups that are created in this block leave errors and time limits to `device_watch.DeviceWatch`. By
    default torch ends the process at a collective's timeout, without an error that names the lost rank.
    """
    before = os.environ.get(_ERROR_HANDLING)
    os.environ[_ERROR_HANDLING] = _NO_HANDLING
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ERROR_HANDLING]
        else:
            os.environ[_ERROR_HANDLING] = before
