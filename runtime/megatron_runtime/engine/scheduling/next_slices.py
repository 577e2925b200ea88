"""The slices of a pass that is prepared before the tokens of the one before it are known."""

from __future__ import annotations

from collections.abc import Sequence as Slices

from megatron_runtime.engine.scheduling.block_allocator import BlockAllocator
from megatron_runtime.engine.scheduling.sequence import Sequence, SequenceSlice


class NextSlices:
    """One token of each sequence of the last pass.

    Args:
        allocator: Has the blocks of the sequences.
        block_size_tokens: Tokens of a block.
    """

    def __init__(self, allocator: BlockAllocator, block_size_tokens: int) -> None:
        self._allocator = allocator
        self._block_size_tokens = block_size_tokens
        self._reserved: list[SequenceSlice] = []

    def reserve(self, slices: Slices[SequenceSlice]) -> tuple[list[SequenceSlice], list[int]]:
        """As `Scheduler.reserve_next`."""
        following: list[SequenceSlice] = []
        ended: list[int] = []
        longer: list[Sequence] = []
        size = self._block_size_tokens
        for place, part in enumerate(slices):
            sequence, start = part.sequence, part.end
            end = start + 1
            if sequence.draft_length:
                return [], []
            if end >= sequence.max_length:
                ended.append(place)
                continue
            # In half of the time that the constructor of a NamedTuple takes.
            after = (sequence, start, end, True, 0, part.num_evictions, (), 0)
            following.append(tuple.__new__(SequenceSlice, after))
            if end > len(sequence.blocks) * size:
                longer.append(sequence)
        if not self._allocator.can_allocate(len(longer)):
            return [], []
        for sequence in longer:  # by one token, so by one block
            sequence.blocks += self._allocator.allocate(1)
        self._reserved = following.copy()  # A schedule may append to its slices.
        return following, ended

    def begin(self, running: Slices[Sequence], number: int) -> list[SequenceSlice]:
        """Begin pass ``number`` over these sequences, if its slices were reserved and each sequence has got its token,
        as in most passes over many sequences; otherwise the result is empty."""
        reserved, self._reserved = self._reserved, []
        slices = reserved if len(reserved) == len(running) else [part for part in reserved if part.counts]
        if len(slices) != len(running):
            return []
        for part, sequence in zip(slices, running, strict=True):
            is_same = part.sequence is sequence and part.num_evictions == sequence.num_evictions
            if not is_same or part.end != len(sequence.tokens):
                return []
            if sequence.next_log_prob is not None or sequence.snapshot_ends:
                return []
        for part, sequence in zip(slices, running, strict=True):
            sequence.num_begun, sequence.last_pass = part.end, number
        return slices
