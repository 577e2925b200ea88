"""A replica group of one rank: there is no other rank, so everything is done at once and costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_runtime.errors import LostRankError
from megatron_runtime.parallel.layout import ParallelSizes, RankPosition


@dataclass(frozen=True)
class Done:
    """A message that is there."""

    message: bytes

    def wait(self) -> bytes:
        """The message."""
        return self.message


class SingleRank:
    """The `Ranks` of a replica that has one. No process group is made."""

    def __init__(self, replica: int = 0) -> None:
        self.position = RankPosition(ParallelSizes(), 0, replica)

    def share_inbox(self, inbox: bytes | None) -> bytes:
        """Its own."""
        assert inbox is not None
        return inbox

    def share_outcome(self, outcome: bytes | None, *, checksum: int) -> Done:
        """Its own."""
        del checksum
        assert outcome is not None
        return Done(outcome)

    def barrier(self, name: str, timeout: float | None = None) -> None:
        """Nothing to wait for."""

    def least(self, number: int) -> int:
        """The number."""
        return number

    def first_error(self, error: str | None, timeout: float | None = None) -> str | None:
        """Its own."""
        del timeout
        return error

    def sum(self, part: Tensor) -> Tensor:
        """The part is all."""
        return part

    def sum_experts(self, part: Tensor) -> Tensor:
        """The part is all."""
        return part

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """The part is all."""
        del widths
        return part

    def send(self, hidden: Tensor) -> None:
        """There is no next stage."""
        del hidden
        raise AssertionError("a single rank has no next stage")

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """There is no stage before."""
        del shape, dtype
        raise AssertionError("a single rank has no stage before it")

    def watch(self, act: Callable[[LostRankError], None]) -> None:
        """No other rank to watch."""

    def close(self) -> None:
        """Nothing to leave."""
