"""Adds drafts to the slices of a pass."""

from __future__ import annotations

from megatron_runtime.engine.scheduling.goodput import Goodput
from megatron_runtime.engine.scheduling.prompt_lookup import PromptLookup
from megatron_runtime.engine.scheduling.schedule import SchedulerLimits
from megatron_runtime.engine.scheduling.sequence import SequenceSlice


def with_drafts(slices: list[SequenceSlice], goodput: Goodput | None, limits: SchedulerLimits) -> list[SequenceSlice]:
    """The slices with drafts, or with the number for a draft model, as far as ``goodput`` permits, and as they have
    room in the pass and in the blocks of their sequences."""
    if all(part.sequence.draft_length is None for part in slices):
        return slices
    rows = sum(part.length for part in slices)
    drafted = _wanted(slices, limits.max_tokens - rows, limits.block_size_tokens)
    if goodput is None:
        return drafted
    wanted = [len(part.drafts) + part.max_drafts for part in drafted]
    permitted = goodput.permitted(rows, sum(part.samples for part in slices), wanted)
    return [
        part._replace(drafts=part.drafts[:count], max_drafts=min(part.max_drafts, count))
        for part, count in zip(drafted, permitted, strict=True)
    ]


def _wanted(slices: list[SequenceSlice], budget: int, block_size_tokens: int) -> list[SequenceSlice]:
    drafted: list[SequenceSlice] = []
    for part in slices:
        sequence, length = part.sequence, part.sequence.draft_length
        may_draft = part.length == 1 and part.samples and not sequence.mask_milliseconds
        if may_draft and length is not None:
            known = len(sequence.tokens)
            room = min(len(sequence.blocks) * block_size_tokens, sequence.max_length - 1) - known
            if isinstance(length, PromptLookup):
                part = part._replace(drafts=length.propose(sequence.tokens, min(room, budget)))
            else:
                part = part._replace(max_drafts=length.within(min(room, budget)))
            budget -= len(part.drafts) + part.max_drafts
        drafted.append(part)
    return drafted
