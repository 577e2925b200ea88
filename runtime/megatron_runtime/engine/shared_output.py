"""Sends the output of a pass from the rank that samples to the other ranks of its replica group."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Slices
from dataclasses import dataclass
from functools import partial

import msgpack

from megatron_runtime.engine.sampling.log_probs import LogProbs
from megatron_runtime.engine.scheduling.sequence import SequenceSlice
from megatron_runtime.engine.text_generation_controller import StepOutput
from megatron_runtime.errors import LockStepError
from megatron_runtime.parallel.ranks import Pending, Ranks

_BITS_64 = 2**64 - 1


PendingOutput = Callable[[], StepOutput]
"""Waits for the output of a pass; to be called once, in the order of the passes."""


class SharedOutputs:
    """The outputs of the passes of a rank, all of which all ranks of its replica group get.

    The rank that samples sends them to the others. Ranks that have the logits too sample the same tokens themselves,
    do not wait for that message, and compare it with their own tokens when the next pass begins.

    Args:
        ranks: The replica group.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._expected: deque[_Expected] = deque()
        """The messages that are on their way, in their order."""

    def own(self, slices: Slices[SequenceSlice], output: PendingOutput) -> PendingOutput:
        """An output that this rank samples. Once it is known, it is sent, or will be compared with the one sent."""
        if self._ranks.position.sizes.ranks_per_replica_group == 1:
            return output
        checksum = schedule_checksum(slices)
        if self._ranks.position.samples:
            return partial(self._send, output, checksum)
        expected = self._expect(checksum)

        def known() -> StepOutput:
            own = output()
            expected.own = own.tokens
            return own

        return known

    def awaited(self, slices: Slices[SequenceSlice]) -> PendingOutput:
        """The output of the rank that samples.

        Waiting for it raises LockStepError when that rank has computed other slices than this one, and LostRankError,
        which names the missing ranks, when it does not arrive.
        """
        expected = self._expect(schedule_checksum(slices))

        def arrived() -> StepOutput:
            self.check()
            assert self._expected.popleft() is expected, "outputs are awaited in the order of their passes"
            return _unpack(expected.message.wait())

        return arrived

    def check(self) -> None:
        """Compare the tokens that this rank has sampled with those of the rank that samples for all.

        Raises:
            LockStepError: They differ, or that rank has computed other slices.
            LostRankError: They do not arrive.
        """
        while self._expected and self._expected[0].own is not None:
            expected = self._expected.popleft()
            tokens = _unpack(expected.message.wait()).tokens
            if tokens != expected.own:
                position = self._ranks.position
                raise LockStepError(
                    f"{position} has sampled the tokens {expected.own}, but rank {position.sampler} {tokens}; they "
                    "have computed different logits, as GPUs or libraries of different kinds may"
                )

    def _expect(self, checksum: int) -> _Expected:
        expected = _Expected(self._ranks.share_outcome(None, checksum=checksum))
        self._expected.append(expected)
        return expected

    def _send(self, output: PendingOutput, checksum: int) -> StepOutput:
        known = output()
        self._ranks.share_outcome(_pack(known), checksum=checksum)
        return known


@dataclass
class _Expected:
    """A message of the rank that samples."""

    message: Pending
    own: list[int] | None = None
    """The tokens that this rank has sampled itself, once they are known."""


def schedule_checksum(slices: Slices[SequenceSlice]) -> int:
    """64-bit checksum of a schedule: which tokens of which requests are computed, and the block of the last ones."""
    parts = ((part.sequence.request_id, part.start, part.length, part.sequence.blocks[-1]) for part in slices)
    return hash(tuple(parts)) & _BITS_64  # A tuple of integers has the same hash in all processes.


def _pack(output: StepOutput) -> bytes:
    scores = output.log_probs
    values = None if scores is None else (scores.chosen, scores.top_ids, scores.top_values)
    fields = output.tokens, values, output.dead_ends, output.pooled, dict(output.mask_milliseconds), output.seconds
    packed: bytes = msgpack.packb(fields)
    return packed


def _unpack(packed: bytes) -> StepOutput:
    tokens, values, *others = msgpack.unpackb(packed, strict_map_key=False)
    return StepOutput(tokens, None if values is None else LogProbs(*values), *others)
