"""What a pass brought, from the rank that samples to all others of its replica."""

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
"""Waits for what a pass brought; to be called once, in the order of the passes."""


def share_output(ranks: Ranks, slices: Slices[SequenceSlice], output: StepOutput) -> PendingOutput:
    """Tell the other ranks of the replica what this one, which samples, has got."""
    if ranks.position.sizes.ranks_per_replica > 1:
        ranks.share_outcome(_pack(output), checksum=schedule_checksum(slices))
    return lambda: output


def awaited_output(ranks: Ranks, slices: Slices[SequenceSlice]) -> PendingOutput:
    """What the rank that samples gets.

    To wait for it raises LockStepError when that rank computed other slices than this one, and LostRankError, which
    names who is missing, when nothing comes.
    """
    arriving = ranks.share_outcome(None, checksum=schedule_checksum(slices))
    return lambda: _unpack(arriving.wait())


def schedule_checksum(slices: Slices[SequenceSlice]) -> int:
    """64 bits that tell schedules apart: who computes which tokens, and where the last of them go."""
    parts = ((part.sequence.request_id, part.start, part.length, part.sequence.blocks[-1]) for part in slices)
    return hash(tuple(parts)) & _BITS_64  # of whole numbers alone, which is the same in all processes


def _pack(output: StepOutput) -> bytes:
    scores = output.log_probs
    values = None if scores is None else (scores.chosen, scores.top_ids, scores.top_values)
    packed: bytes = msgpack.packb((output.tokens, values, output.dead_ends))
    return packed


def _unpack(packed: bytes) -> StepOutput:
    tokens, values, dead_ends = msgpack.unpackb(packed, strict_map_key=False)
    return StepOutput(tokens, None if values is None else LogProbs(*values), dead_ends)
