"""Sums and gathers of tensors on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_runtime.parallel.exchange import Exchange
from megatron_runtime.parallel.layout import RankPosition
from megatron_runtime.parallel.process_groups import ProcessGroups


class CpuCollectives:
    """The `Collectives` of CPUs, over sockets of this project, and gloo for logits.

    Parts are added in the order of the ranks. A ring, as in gloo's reduction, begins at another rank for each chunk of
    a tensor, so that a row's bits would depend on the rows beside it. Logits go to one rank, because sampling on all
    of them would take the time of all their processors.
    """

    only_begins = False
    can_abort = True
    adds_up_in_order = True
    gathers_to_all = False

    def __init__(
        self, position: RankPosition, groups: ProcessGroups, open_exchange: Callable[[str, range], Exchange]
    ) -> None:
        self._position = position
        self._groups = groups
        self._tensor = open_exchange("exchange", position.tensor_peers) if position.sizes.tensor > 1 else None
        self._expert = self._tensor
        if position.stage_peers != position.tensor_peers:
            self._expert = open_exchange("expert-exchange", position.stage_peers)

    def sum(self, part: Tensor) -> Tensor:
        """As in Collectives."""
        assert self._tensor is not None, "there are several ranks"
        return _sum(self._tensor, part)

    def memory_for_part(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """None: gloo copies all parts."""

    def sum_experts(self, part: Tensor) -> Tensor:
        """As in Collectives."""
        assert self._expert is not None, "there are several ranks"
        return _sum(self._expert, part)

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """As in Collectives."""
        padded = torch.nn.functional.pad(part, (0, max(widths) - part.shape[1])).contiguous()
        first = self._position.tensor_peers[0]
        gathered = [torch.empty_like(padded) for _ in widths] if self._position.rank == first else None
        dist.gather(padded, gathered, dst=self._groups.first + first, group=self._groups.tensor)
        if gathered is None:
            return None
        return torch.cat([columns[:, :width] for columns, width in zip(gathered, widths, strict=True)], dim=1).float()

    def abort(self) -> None:
        """Does nothing: the host waits itself, and its connections end with a lost rank."""

    def close(self) -> None:
        """As in Collectives."""
        for opened in (self._tensor, self._expert):
            if opened is not None:
                opened.close()


def _sum(exchange: Exchange, part: Tensor) -> Tensor:
    first, second, *others = exchange.parts(part)
    total = first + second
    for other in others:
        total += other
    return total
