"""A replica group of one rank: every operation returns at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from megatron_runtime.errors import LostRankError
from megatron_runtime.parallel.layout import ParallelSizes, RankPosition

T = TypeVar("T")


@dataclass(frozen=True)
class Done:
    """A message that has arrived."""

    message: bytes

    def wait(self) -> bytes:
        """The message."""
        return self.message


class SingleRank:
    """The `Ranks` of a replica group with one rank. It creates no process group."""

    has_logits = True
    samples_for_all = True

    def __init__(self, replica_group: int = 0) -> None:
        self.position = RankPosition(ParallelSizes(), 0, replica_group)

    def share_inbox(self, inbox: bytes | None) -> bytes:
        """The argument."""
        assert inbox is not None
        return inbox

    def share_outcome(self, outcome: bytes | None, *, checksum: int) -> Done:
        """The argument."""
        del checksum
        assert outcome is not None
        return Done(outcome)

    def barrier(self, name: str, timeout: float | None = None) -> None:
        """Does nothing."""

    def least(self, number: int) -> int:
        """The number."""
        return number

    def first_error(self, error: str | None, timeout: float | None = None) -> str | None:
        """The argument."""
        del timeout
        return error

    def sum(self, part: Tensor) -> Tensor:
        """The part."""
        return part

    def memory_for_part(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """None: nothing is added up."""

    def sum_experts(self, part: Tensor) -> Tensor:
        """The part."""
        return part

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """The part in float32."""
        del widths
        return part.float()

    def send(self, hidden: Tensor) -> None:
        """Never called, because there is no next stage."""
        del hidden
        raise AssertionError("a single rank has no next stage")

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Never called, because there is no previous stage."""
        del shape, dtype
        raise AssertionError("a single rank has no stage before it")

    def watch(self, act: Callable[[LostRankError], None]) -> None:
        """Does nothing."""

    def supervise(self, work: Callable[[], T], timeout: float | None = None) -> T:
        """Does the work."""
        del timeout
        return work()

    def await_device(self, event: torch.cuda.Event | None = None) -> None:
        """Waits for the event."""
        if event is not None:
            event.synchronize()

    def close(self) -> None:
        """Does nothing."""
