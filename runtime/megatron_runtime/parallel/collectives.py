"""Sums and gathers of tensors between the ranks of a stage: the interface, and the choice by the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_runtime.parallel.cpu_collectives import CpuCollectives
from megatron_runtime.parallel.exchange import Exchange
from megatron_runtime.parallel.gpu_collectives import GpuCollectives
from megatron_runtime.parallel.layout import RankPosition
from megatron_runtime.parallel.process_groups import ProcessGroups
from megatron_runtime.parallel.symmetric_memory import Share, open_symmetric_sums


class Collectives(Protocol):
    """The operations of one kind of device. All ranks that take part call them in the same order."""

    @property
    def only_begins(self) -> bool:
        """Whether operations return before the device has done them, so that it waits for lost ranks and not the host;
        `abort` ends that."""
        ...

    @property
    def can_abort(self) -> bool:
        """Whether `abort` ends the work of the device. Otherwise the host must not wait for it without an end."""
        ...

    @property
    def gathers_to_all(self) -> bool:
        """Whether `gather` has a result on all ranks of the layer, not on the first one alone."""
        ...

    @property
    def adds_up_in_order(self) -> bool:
        """Whether parts are added in the order of the ranks. On GPUs, sums that `SymmetricSums.fits` does not support
        are not.
        """
        ...

    def sum(self, part: Tensor) -> Tensor:
        """As in `ranks.Ranks`, of several ranks."""
        ...

    def memory_for_part(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """As in `ranks.Ranks`, of several ranks."""
        ...

    def sum_experts(self, part: Tensor) -> Tensor:
        """As in `ranks.Ranks`, of several ranks."""
        ...

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """As in `ranks.Ranks`, of several ranks."""
        ...

    def abort(self) -> None:
        """End the work of the device that waits for other ranks. Its results are undefined, and it begins no other.
        Any thread may call it."""
        ...

    def close(self) -> None:
        """Close own connections; the process groups are closed by their owner."""
        ...


def make_collectives(
    device: torch.device,
    position: RankPosition,
    groups: ProcessGroups,
    open_exchange: Callable[[str, range], Exchange],
    share: Share,
) -> Collectives:
    """Those of the device.

    Args:
        device: That of this rank.
        position: The place of this rank.
        groups: Its process groups.
        open_exchange: Opens an exchange with a name between some ranks, for a CPU.
        share: Shares what all ranks of the replica group contribute, for GPUs.
    """
    if device.type == "cuda":
        return GpuCollectives(groups, device, open_symmetric_sums(position, groups, device, share))
    return CpuCollectives(position, groups, open_exchange)
