"""Chooses the running sequences that make room for one in the queue."""

from __future__ import annotations

from collections import Counter

from megatron_runtime.engine.scheduling.block_allocator import BlockAllocator
from megatron_runtime.engine.scheduling.running_sequences import RunningSequences
from megatron_runtime.engine.scheduling.sequence import Sequence


def to_preempt(
    head: Sequence,
    matched: list[int],
    running: RunningSequences,
    allocator: BlockAllocator,
    *,
    num_needed: int,
    max_requests: int,
) -> list[Sequence]:
    """The fewest sequences beyond an equal share without which ``head`` can begin; none if all would not suffice.

    Args:
        head: The sequence in the queue.
        matched: The blocks of its known prefix.
        running: The running sequences.
        allocator: Of their blocks.
        num_needed: Number of free blocks with which it begins beside all that are running, one of them for each.
        max_requests: Most running sequences.
    """
    chosen: list[Sequence] = []
    num_free = allocator.num_free_besides(matched)
    kept, lost = set(matched), Counter[int]()
    for sequence in running.excess(head):
        chosen.append(sequence)
        lost.update(sequence.blocks)
        num_free += sum(lost[block] == allocator.num_owners_of(block) for block in sequence.blocks if block not in kept)
        if len(running) - len(chosen) < max_requests and num_needed - len(chosen) <= num_free:
            return chosen
    return []
