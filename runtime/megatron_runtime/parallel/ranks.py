"""What a rank may ask of the other ranks of its replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_runtime.errors import LostRankError
from megatron_runtime.parallel.layout import RankPosition


class Pending(Protocol):
    """A message that may still be on its way."""

    def wait(self) -> bytes:
        """The message; LostRankError when it doesn't come in time. To be called once."""
        ...


class Ranks(Protocol):
    """The replica as one of its ranks sees it.

    All ranks call the same methods in the same order, but for `share_outcome`, which has an order of its own. What
    waits for other ranks raises LostRankError after the group's timeout, or as soon as a connection breaks; the error
    names who is missing. Nothing works after that but `close`. None of it uses the processor while it waits.
    """

    @property
    def position(self) -> RankPosition:
        """Which one this is."""
        ...

    def share_inbox(self, inbox: bytes | None) -> bytes:
        """What the first rank gives, on all ranks; the others give None, and wait.

        The first rank doesn't wait for the others. They wait for the group's timeout at most, so it has to share
        something well within that, if only ``b""``.
        """
        ...

    def share_outcome(self, outcome: bytes | None, *, checksum: int) -> Pending:
        """What the rank that samples gives, on all ranks; the others give None. Nobody waits before ``wait``.

        So the outcomes of as many passes can be in flight as there are stages; they come in the order in which they
        were shared, and are to be waited for in it. Each is compared by ``checksum`` (64
        bits, unsigned) of the schedule it comes from: LockStepError on the rank whose own is another.
        """
        ...

    def barrier(self, name: str, timeout: float | None = None) -> None:
        """Wait until all ranks are in the barrier of this name; LostRankError after ``timeout`` seconds."""
        ...

    def least(self, number: int) -> int:
        """The smallest of the numbers that the ranks give."""
        ...

    def first_error(self, error: str | None, timeout: float | None = None) -> str | None:
        """The error of the lowest rank that gives one, on all ranks; None when no rank does.

        LostRankError after ``timeout`` seconds, or those of the group.
        """
        ...

    def sum(self, part: Tensor) -> Tensor:
        """The sum over the ranks of this dense layer, alike to the bit on all; on a GPU ``part`` becomes it."""
        ...

    def sum_experts(self, part: Tensor) -> Tensor:
        """The same over all ranks of this stage, which share its experts; more than those of ``sum`` where dense layers
        have copies."""
        ...

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """The columns of all ranks of this layer side by side, on the first of them; None on the others.

        ``part`` is [rows, widths[tensor rank]].
        """
        ...

    def send(self, hidden: Tensor) -> None:
        """Hand activations to the next stage, without waiting for it unless a batch per stage is in flight.

        ``hidden`` must not be written to any more.
        """
        ...

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Activations from the stage before, in the order in which they were sent."""
        ...

    def watch(self, act: Callable[[LostRankError], None]) -> None:
        """From now on call ``act``, in another thread, when a rank's host is not reached and nothing else has noticed.

        Until ``close``; to be called once. The error names who is missing. Without this, a rank that waits for another
        one in a collective of torch's notices after the group's timeout alone.
        """
        ...

    def close(self) -> None:
        """Leave the group; to be called on all ranks, in any order."""
        ...
