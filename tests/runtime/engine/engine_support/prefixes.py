"""Prompts with common prefixes for a scheduler without a model, and the contents of their blocks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

from engine_support import scheduling
from engine_support.scheduling import SchedulerLives
from hypothesis import strategies as st
from hypothesis.stateful import rule

from megatron_runtime.config import PrefixCachingEvictionPolicy
from megatron_runtime.engine.scheduling.schedule import Schedule
from megatron_runtime.engine.scheduling.sequence import Sequence

LIMITS: dict[str, st.SearchStrategy[Any]] = {
    "blocks": st.integers(4, 30),
    "block_size": st.integers(1, 4),
    "max_requests": st.integers(1, 6),
    "spare_tokens": st.integers(0, 30),
    "chunked": st.booleans(),
    "policy": st.sampled_from(PrefixCachingEvictionPolicy),
    "num_hashes": st.sampled_from([None, 3]),
    "paused_blocks": st.integers(0, 8),
    "passes": st.integers(1, 4),
}
"""Of a random scheduler, for ``RandomPrefixes.start``."""
LRU = PrefixCachingEvictionPolicy.LRU
BLOCK = 4
scheduler_of = partial(scheduling.scheduler_of, policy=LRU, block_size=BLOCK, max_tokens=64)


def sequence_of(
    request_id: int, prompt: list[int], answer: int = 1, *, block_size: int = BLOCK, num_hashes: int | None = None
) -> Sequence:
    """With hashes that practically never collide, or that have only a few values."""
    hashes = []
    for end in range(block_size, len(prompt) + 1, block_size):
        perfect = hash(tuple(prompt[:end]))
        hashes.append(perfect if num_hashes is None else perfect % num_hashes)
    return Sequence(request_id, list(prompt), len(prompt), len(prompt) + answer, block_hashes=hashes)


class Memory:
    """The contents of the KV blocks: for each slot the tokens that its keys and values were computed from, and when."""

    def __init__(self, block_size: int) -> None:
        self.weights = 0
        self._block_size = block_size
        self._slots: dict[tuple[int, int], tuple[tuple[int, ...], int]] = {}
        self._weights_at_begin: dict[int, int] = {}

    def compute(self, schedule: Schedule) -> None:
        """Read what every slice attends to, then write what it computes, as the forward pass does."""
        self._weights_at_begin |= {sequence.request_id: self.weights for sequence in schedule.admitted}
        for part in schedule.slices:
            for position in range(part.start):
                tokens, weights = self._slots[self._slot(part.sequence, position)]
                assert tokens == tuple(part.sequence.tokens[: position + 1]), "a request attends to another's tokens"
                assert weights >= self._weights_at_begin[part.sequence.request_id], "a request begins on old weights"
        written: set[tuple[int, int]] = set()
        for part in schedule.slices:
            for position in range(part.start, part.end):
                slot = self._slot(part.sequence, position)
                assert slot not in written, "two requests write to the same slot"
                written.add(slot)
                self._slots[slot] = tuple(part.sequence.tokens[: position + 1]), self.weights

    def clear(self) -> None:
        """Drops the contents."""
        self._slots.clear()

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.blocks[position // self._block_size], position % self._block_size


def starts_of(schedule: Schedule) -> dict[int, int]:
    return {part.sequence.request_id: part.start for part in schedule.slices}


class RandomPrefixes(SchedulerLives):
    """Submissions, passes, aborts, suspensions and weight updates in any order, over prompts with common prefixes."""

    passes_per_token = 3

    def start(
        self, num_hashes: int | None, max_requests: int, spare_tokens: int, block_size: int, **limits: Any
    ) -> None:
        """Called by the test's `initialize`, with what `scheduler_of` takes."""
        self.memory = Memory(block_size)
        max_tokens = max_requests + spare_tokens
        self.use(scheduler_of(max_requests=max_requests, max_tokens=max_tokens, block_size=block_size, **limits))
        self.num_hashes = num_hashes
        self.ids = itertools.count()

    @rule(
        stem=st.integers(0, 20),
        own=st.lists(st.integers(0, 1), max_size=8),
        answer=st.integers(1, 20),
        scores=st.booleans(),
        shares=scheduling.shares(),
    )
    def add(self, stem: int, own: list[int], answer: int, scores: bool, shares: dict[str, Any]) -> None:
        limits = self.scheduler.limits
        prompt = [5] * stem + own
        if not prompt or (not limits.chunked_prefill and len(prompt) > limits.max_tokens):
            return
        size = limits.block_size_tokens
        sequence = sequence_of(next(self.ids), prompt, answer, block_size=size, num_hashes=self.num_hashes)
        sequence = replace(sequence, **shares)
        sequence.next_log_prob = 1 if scores else None
        if self.scheduler.can_ever_fit(sequence):
            self.alive[sequence.request_id] = sequence
            self.scheduler.add(sequence)

    def compute(self, schedule: Schedule) -> None:
        self.memory.compute(schedule)
        for part in schedule.slices:
            if part.sequence.next_log_prob is not None:
                assert part.sequence.num_cached == 0

    @rule()
    def suspend_and_recompute(self) -> None:
        self.scheduler.evict_all()
        self.scheduler.forget_prefixes()
        self.memory.clear()
        assert self.scheduler.allocator.num_used == self.scheduler.allocator.num_evictable == 0

    @rule()
    def change_the_weights(self) -> None:
        self.memory.weights += 1
        self.scheduler.forget_prefixes()
        assert self.scheduler.allocator.num_evictable == 0
