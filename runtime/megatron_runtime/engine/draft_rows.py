"""The rows of a pass that verify drafts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_runtime.engine.scheduling.sequence import SequenceSlice


@contextmanager
def draft_rows(slices: list[SequenceSlice]) -> Iterator[list[SequenceSlice]]:
    """The slices, with a slice of its own for each draft behind that of its sequence. Drafts are tokens of their
    sequences in this context.

    A slice of one token is computed like a decode step, so that its logits have the same bits as without drafts.
    """
    drafted = [part for part in slices if part.drafts]
    if not drafted:
        yield slices
        return
    for part in drafted:
        part.sequence.tokens.extend(part.drafts)
        part.sequence.num_drafts = len(part.drafts)
    try:
        yield [row for part in slices for row in _rows(part)]
    finally:
        for part in drafted:
            del part.sequence.tokens[part.end :]
            part.sequence.num_drafts = 0


def _rows(part: SequenceSlice) -> Iterator[SequenceSlice]:
    for place in range(len(part.drafts) + 1):
        yield part._replace(start=part.start if place == 0 else part.end + place - 1, end=part.end + place, drafts=())
