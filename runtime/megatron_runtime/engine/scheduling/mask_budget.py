"""Limits the time that masks of grammars add to a pass."""

from __future__ import annotations

from collections.abc import Sequence as Sequences

from megatron_runtime.engine.scheduling.sequence import Sequence


def held_back(running: Sequences[Sequence], budget: int) -> set[int]:
    """Request ids of the sequences that wait for a later pass, because their masks would take too long in this one.

    The mask of a small grammar takes microseconds, that of one with hundreds of properties several milliseconds, and
    all requests of a pass wait for the masks of all. Sequences with slow masks share the budget: those that waited
    longest are in the pass, at least one of them. The most urgent sequence is never held back.

    Args:
        running: The running sequences, the most urgent first.
        budget: Milliseconds per pass.
    """
    slow = [sequence for sequence in running[1:] if sequence.mask_milliseconds and sequence.num_left]
    slow.sort(key=lambda sequence: sequence.last_pass)
    held: set[int] = set()
    total = 0
    for sequence in slow:
        if total and total + sequence.mask_milliseconds > budget:
            held.add(sequence.request_id)
        else:
            total += sequence.mask_milliseconds
    return held
