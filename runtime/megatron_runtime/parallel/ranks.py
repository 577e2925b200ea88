"""The interface of a rank to the other ranks of its replica group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from megatron_runtime.errors import LostRankError
from megatron_runtime.parallel.layout import RankPosition

T = TypeVar("T")


class Pending(Protocol):
    """A message that may not have arrived yet."""

    def wait(self) -> bytes:
        """The message. Raises LostRankError after the timeout. Call it once."""
        ...


class Ranks(Protocol):
    """A replica group, from the view of one of its ranks.

    All ranks call the same methods in the same order, except `share_outcome`, which has a separate order. Methods that
    wait for other ranks raise LostRankError after the group's timeout, or as soon as a connection breaks; the error
    names the missing ranks. After an error only `close` may be called. Waiting does not use the processor.
    """

    @property
    def position(self) -> RankPosition:
        """The place of this rank."""
        ...

    @property
    def has_logits(self) -> bool:
        """Whether this rank gets the logits of the model: on a CPU the rank that samples, on a GPU each rank that
        computes a part of them.
        """
        ...

    @property
    def samples_for_all(self) -> bool:
        """Whether all ranks of the replica group get each output from the rank that samples; otherwise those with the
        logits sample themselves.
        """
        ...

    def share_inbox(self, inbox: bytes | None) -> bytes:
        """The argument of the first rank, on all ranks; the others pass None, and wait.

        The first rank doesn't wait for the others. They wait for at most the group's timeout, so the first rank has to
        share something, at least ``b""``, well within that.
        """
        ...

    def share_outcome(self, outcome: bytes | None, *, checksum: int) -> Pending:
        """The argument of the rank that samples, on all ranks; the others pass None. Only ``wait`` of the result waits.

        As many outcomes can be in flight as there are stages. They arrive in the order in which they were shared, and
        must be waited for in that order. ``checksum`` (64 bits, unsigned) is that of the pass's schedule; ranks with
        another one raise LockStepError.
        """
        ...

    def barrier(self, name: str, timeout: float | None = None) -> None:
        """Wait until all ranks have reached the barrier ``name``. Raises LostRankError after ``timeout`` seconds."""
        ...

    def least(self, number: int) -> int:
        """The minimum over all ranks."""
        ...

    def first_error(self, error: str | None, timeout: float | None = None) -> str | None:
        """The error of the lowest rank that passes one, on all ranks; None if no rank does.

        Raises LostRankError after ``timeout`` seconds, or those of the group.
        """
        ...

    def sum(self, part: Tensor) -> Tensor:
        """The sum over the ranks of this dense layer, bitwise equal on all; on a GPU it is written to ``part``, unless
        that is in `memory_for_part`.
        """
        ...

    def memory_for_part(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Memory for the next part that ``sum`` adds up: a part in it is not copied. None if that saves nothing.

        ``sum`` leaves undefined values in it, and returns the sum elsewhere.
        """
        ...

    def sum_experts(self, part: Tensor) -> Tensor:
        """The same over all ranks of this stage, which share its experts; more than those of ``sum`` if dense layers
        have copies.
        """
        ...

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """The columns of all ranks of this layer side by side, in float32. On a CPU on the first of them, None on the
        others; on a GPU on all of them.

        ``part`` is [rows, widths[tensor rank]].
        """
        ...

    def send(self, hidden: Tensor) -> None:
        """Send activations to the next stage. Waits only if a batch per stage is in flight.

        ``hidden`` must not be written to afterwards.
        """
        ...

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Activations from the previous stage, in the order in which they were sent."""
        ...

    def watch(self, act: Callable[[LostRankError], None]) -> None:
        """Call ``act``, in another thread, when a rank's host is unreachable and nothing else has detected that.

        Call it once; it ends with ``close``. The error names the missing rank. Without it, a rank that waits in a torch
        collective would detect this only at the group's timeout.
        """
        ...

    def supervise(self, work: Callable[[], T], timeout: float | None = None) -> T:
        """The result of ``work``, which may wait for the device of this rank, and by that for other ranks.

        Raises LostRankError if a rank is lost meanwhile, or if the work takes longer than ``timeout`` seconds, or those
        of the group. On a CPU, which does not wait by itself, it is done without supervision.
        """
        ...

    def await_device(self, event: torch.cuda.Event | None = None) -> None:
        """Wait for what the device of this rank has to do, without an end only if `supervise` can end it.

        Before the host reads a result, it calls this, or else the read itself would wait. Raises LostRankError as
        `supervise` does.

        Args:
            event: Wait for it; None: for all that the current stream has, if a read could wait without an end.
        """
        ...

    def close(self) -> None:
        """Leave the group. Called on all ranks, in any order."""
        ...
