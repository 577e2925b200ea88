"""Sums between the GPUs of one machine, in memory that all of them read and write.

Kernels of PyTorch (``torch.ops.symm_mem``) read the parts of all ranks over the links between the GPUs. They take less
time than NCCL's for the small sums of decode passes. All of them add the parts in the order of the ranks, so that a sum
has the same bits on all ranks, and in each batch: no other row changes those of a row, nor which kernel it is.

A kernel waits for the others by polling, without an end, and nothing can abort it.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.parallel.layout import RankPosition
from megatron_runtime.parallel.process_groups import ProcessGroups

logger = logging.getLogger(__name__)

SETTING = "MEGATRON_ALL_REDUCE"
"""The environment variable that chooses: ``auto``, the default, or ``nccl``."""
BUFFER_BYTES = 8 * 2**20
"""The largest sum: 512 tokens of 8192 channels in 16 bits, as the largest CUDA graph has by default."""
ONE_SHOT_BYTES = {2: BUFFER_BYTES, 4: 512 * 2**10, 8: 256 * 2**10}
"""By number of ranks, the largest sum that each rank computes whole. Of a larger one each rank computes a part, and
reads the others: with 4 ranks half the bytes, and one more exchange. No GPU has timed these limits.
"""
_DTYPES = (torch.float32, torch.bfloat16)
_STEP = 4
"""Bytes that the kernels need each row to be a multiple of."""
_ALIGNMENT = 16
_CAPABILITY = (8, 0)
_WORDS = 120
"""Characters of an obstacle that other ranks get."""

Share = Callable[[str, bytes], Sequence[bytes]]
"""What all ranks of the replica group contribute, by rank; with a name for what they do."""


class SymmetricSums:
    """The sums of one process group. Created on all its ranks, which then compute the same sums in the same order.

    Args:
        group: The process group, of 2, 4 or 8 ranks.
        device: The GPU of this rank.

    Raises:
        RuntimeError: PyTorch can't share the memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        torch_ = import_symmetric_memory()
        self._operations = torch_.operations
        self._group_name = group.group_name
        self._one_shot_bytes = ONE_SHOT_BYTES[group.size()]
        self._buffer = torch_.memory.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)
        torch_.memory.rendezvous(self._buffer, self._group_name)

    def fits(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Whether `add_up` supports this sum. All ranks have to find the same, so only the type and the shape decide;
        and of the sizes only that of the whole depends on the number of rows.
        """
        row_bytes = (shape[-1] if shape else 1) * dtype.itemsize
        has_size = 0 < math.prod(shape) * dtype.itemsize <= BUFFER_BYTES
        return has_size and dtype in _DTYPES and row_bytes % _STEP == 0

    def memory_for(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """As `ranks.Ranks.memory_for_part`."""
        return self._shared(shape, dtype) if self.fits(shape, dtype) else None

    def add_up(self, part: Tensor) -> Tensor:
        """The sum over all ranks, in the place of the part of this rank: two launches on the current stream, and one
        more for a part that the kernels can't write to, which may be so on some ranks alone. One launch for a part in
        `memory_for`, whose sum is elsewhere.

        PyTorch has kernels that copy the part themselves. They tell other ranks of it before all threads of a block
        have copied theirs.
        """
        shared = self._shared(part.shape, part.dtype)
        is_there = part.is_contiguous() and part.data_ptr() == shared.data_ptr()
        if not is_there:
            shared.copy_(part)
        is_aligned = part.is_contiguous() and part.storage_offset() * part.element_size() % _ALIGNMENT == 0
        takes_sum = is_aligned and not is_there
        total = part if takes_sum else torch.empty(part.shape, dtype=part.dtype, device=part.device)
        if shared.nbytes <= self._one_shot_bytes:
            self._operations.one_shot_all_reduce_out(shared, "sum", self._group_name, total)
        else:
            self._operations.two_shot_all_reduce_out(shared, "sum", self._group_name, total)
        if takes_sum or is_there:
            return total
        part.copy_(total)
        return part

    def _shared(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        shared: Tensor = self._buffer[:num_bytes].view(dtype).view(*shape)
        return shared


def import_symmetric_memory() -> Any:
    """PyTorch's module ``memory`` and its ``operations``. Raises ImportError where it has none."""
    from torch.distributed import _symmetric_memory as memory

    return SimpleNamespace(memory=memory, operations=torch.ops.symm_mem)


@dataclass(frozen=True)
class _Place:
    """Where a rank computes."""

    machine: str
    """Processes with another one can't share memory with it."""
    index: int
    gpu: str
    obstacle: str | None = None


def open_symmetric_sums(
    position: RankPosition, groups: ProcessGroups, device: torch.device, share: Share
) -> dict[dist.ProcessGroup, SymmetricSums]:
    """For each process group in which ranks add up parts, unless something prevents it. Called on all ranks.

    Raises:
        ConfigurationError: The setting has an unknown value.
    """
    wanted = {groups.tensor: list(position.tensor_peers), groups.expert: list(position.stage_peers)}
    members = {group: ranks for group, ranks in wanted.items() if len(ranks) > 1}
    mine = json.dumps(asdict(_place(device))).encode()
    places = [_Place(**json.loads(each)) for each in share("finding the GPUs", mine)]
    obstacles = [_obstacle(device, places, ranks) for ranks in members.values()]
    obstacles = _agree("choosing how to add up", members, obstacles, share)
    made: dict[dist.ProcessGroup, SymmetricSums] = {}
    for number, group in enumerate(members):
        if obstacles[number] is None:
            try:
                made[group] = SymmetricSums(group, device)
            except RuntimeError as error:
                obstacles[number] = f"PyTorch can't share memory ({str(error).splitlines()[0]})"
    obstacles = _agree("sharing memory", members, obstacles, share)
    for ranks, obstacle in zip(members.values(), obstacles, strict=True):
        if obstacle is None:
            logger.info("the ranks %s add up by symmetric memory, and by NCCL above %d MiB", ranks, BUFFER_BYTES >> 20)
        else:
            logger.info("the ranks %s add up by NCCL: %s", ranks, obstacle)
    return {group: made[group] for group, obstacle in zip(members, obstacles, strict=True) if obstacle is None}


def _place(device: torch.device) -> _Place:
    from megatron_runtime.gpu import peers

    setting = os.environ.get(SETTING, "auto")
    if setting not in ("auto", "nccl"):
        raise ConfigurationError(f"{SETTING}={setting}: unknown; use auto or nccl", field=SETTING)
    obstacle = None
    if setting == "nccl":
        obstacle = f"{SETTING} is nccl"
    elif torch.cuda.get_device_capability(device) < _CAPABILITY:
        obstacle = "the GPU is older than compute capability 8.0"
    else:
        try:
            import_symmetric_memory()
        except ImportError as error:
            obstacle = f"PyTorch {torch.__version__} has no symmetric memory ({error})"[:_WORDS]
    return _Place(_machine(), device.index, peers.identity(device), obstacle)


def _machine() -> str:
    """The machine, and what processes have to share so that PyTorch can pass memory between them."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, *(str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("mnt", "pid"))])


def _obstacle(device: torch.device, places: Sequence[_Place], ranks: Sequence[int]) -> str | None:
    """What prevents these ranks, as far as this one of them knows."""
    from megatron_runtime.gpu import peers

    members = [places[rank] for rank in ranks]
    if len(members) not in ONE_SHOT_BYTES:
        return f"there are no kernels for {len(members)} ranks"
    if (known := next((each.obstacle for each in members if each.obstacle is not None), None)) is not None:
        return known
    if len({each.machine for each in members}) > 1:
        return "they are on several machines, or in several containers"
    if len({each.index for each in members}) < len(members):
        return "some of them have the same GPU, or see only their own"
    others = (each.gpu for each in members if each.index != device.index)
    return next((found for each in others if (found := peers.peer_obstacle(device, each)) is not None), None)


def _agree(
    doing: str, members: dict[dist.ProcessGroup, list[int]], obstacles: Sequence[str | None], share: Share
) -> list[str | None]:
    """For each group the first obstacle of its ranks."""
    contribution = json.dumps([each and each[:_WORDS] for each in obstacles]).encode()
    said = [json.loads(each) for each in share(doing, contribution)]
    return [
        next((said[rank][number] for rank in ranks if said[rank][number] is not None), None)
        for number, ranks in enumerate(members.values())
    ]
