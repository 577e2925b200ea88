"""Sends the output of a pass from the rank that samples to the other ranks of its replica group."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Slices

import msgpack

from megatron_runtime.engine.sampling.log_probs import LogProbs
from megatron_runtime.engine.scheduling.sequence import SequenceSlice
from megatron_runtime.engine.text_generation_controller import StepOutput
from megatron_runtime.parallel.ranks import Ranks

_BITS_64 = 2**64 - 1


PendingOutput = Callable[[], StepOutput]
"""Waits for the output of a pass; to be called once, in the order of the passes."""


def share_output(ranks: Ranks, slices: Slices[SequenceSlice], output: StepOutput) -> PendingOutput:
    """Send the output of this rank, which samples, to the other ranks of the replica group."""
    if ranks.position.sizes.ranks_per_replica_group > 1:
        ranks.share_outcome(_pack(output), checksum=schedule_checksum(slices))
    return lambda: output


def awaited_output(ranks: Ranks, slices: Slices[SequenceSlice]) -> PendingOutput:
    """The output of the rank that samples.

    Waiting for it raises LockStepError when that rank has computed other slices than this one, and LostRankError, which
    names the missing ranks, when it does not arrive.
    """
    arriving = ranks.share_outcome(None, checksum=schedule_checksum(slices))
    return lambda: _unpack(arriving.wait())


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
