"""Which tokens of which requests the next forward pass computes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_runtime.engine.scheduling.block_allocator import BlockAllocator
from megatron_runtime.engine.scheduling.ordered_sequences import OrderedSequences
from megatron_runtime.engine.scheduling.sequence import Sequence, SequenceSlice


@dataclass(frozen=True)
class SchedulerLimits:
    """What one forward pass may hold."""

    max_requests: int
    max_tokens: int
    block_size_tokens: int
    chunked_prefill: bool
    paused_blocks: int = 0
    """Most blocks that sequences may own while they wait for further ones."""
    passes_in_flight: int = 1
    """Most passes that are begun before the first of them is settled; each computes its share of the sequences."""

    def __post_init__(self) -> None:
        assert self.max_tokens >= self.max_requests, "every running sequence needs at least one token per pass"


@dataclass(frozen=True)
class Schedule:
    """One forward pass, and what changed for it to be possible."""

    slices: list[SequenceSlice]
    """What to compute; the most urgent sequence first."""
    admitted: list[Sequence]
    """Sequences that left the queue."""
    evicted: list[Sequence]
    """Sequences that gave their blocks back and went back to the queue; the least urgent first."""
    paused: list[Sequence]
    """Sequences that begin to wait for a block with what they own; the most urgent first."""


_Upcoming = dict[int, tuple[int, ...]]
"""Hashes and tokens of the blocks that the prefix cache will know after a pass."""


class Scheduler:
    """By priority, then first come, first served, over a fixed pool of blocks; pure bookkeeping.

    Every running sequence gets at least one token in every pass, or, where several passes are in flight, in one of
    them: each takes the most urgent sequences that are not waiting for their next token, so many that there are enough
    for all passes. When the pool is exhausted, who needs a block pauses with those that it owns, as far as the limits
    allow; otherwise the least urgent running sequence gives way. Either way the most urgent proceeds, and nobody new
    is admitted meanwhile: as long as each sequence alone fits the pool (which the engine checks on submission), all of
    them end, unless more urgent ones never cease to come. A sequence that runs is not put back for a more urgent one
    that waits.

    Passes are computed in the order of their schedules, so that blocks which were given back meanwhile can be given
    away at once: whoever has them next writes later. What a pass computes for a sequence that has lost its blocks
    meanwhile does not count.

    If the allocator has a prefix cache, a sequence begins after what is known of its tokens. Only whole blocks are
    skipped, and never the last token, so nobody writes into a block that others own. A sequence whose next block is
    being computed for another one waits for it.
    """

    def __init__(self, limits: SchedulerLimits, allocator: BlockAllocator) -> None:
        self.limits = limits
        self.allocator = allocator
        self._prefixes = allocator.prefixes
        self._running = OrderedSequences()
        self._waiting = OrderedSequences()
        self._arrivals = 0
        self._paused: set[int] = set()
        self._slices: list[SequenceSlice] = []

    @property
    def num_running(self) -> int:
        """Sequences that own blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @property
    def num_paused(self) -> int:
        """Running sequences that got no token in the last pass, for want of a block."""
        return len(self._paused)

    @property
    def has_idle(self) -> bool:
        """True if another pass might compute something before those in flight are settled."""
        return bool(self._waiting) or any(sequence.num_left for sequence in self._running)

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens of the last pass."""
        return sum(part.length for part in self._slices)

    @property
    def running_ids(self) -> list[int]:
        """Request ids of the running sequences, the most urgent first."""
        return self._running.ids

    def __contains__(self, sequence: Sequence) -> bool:
        """True if the sequence runs or waits."""
        return sequence in self._running or sequence in self._waiting

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.limits.block_size_tokens)

    def can_ever_fit(self, sequence: Sequence) -> bool:
        """True if the pool, otherwise empty, holds the sequence to its end; the last token is never computed."""
        longest = max(len(sequence.tokens), sequence.max_length - 1)
        return self.blocks_for(longest) <= self.allocator.num_blocks

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the queue, after all that are as urgent."""
        assert self.can_ever_fit(sequence), f"request {sequence.request_id} never fits the pool"
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that runs or waits, and free its blocks."""
        self._paused.discard(sequence.request_id)
        (self._running if sequence in self._running else self._waiting).remove(sequence)
        self._release(sequence)

    def schedule(self) -> Schedule:
        """Decide the next pass; allocates, pauses, evicts and admits as it says."""
        slices: list[SequenceSlice] = []
        evicted: list[Sequence] = []
        paused: list[Sequence] = []
        budget = self.limits.max_tokens
        share = self._share(len(self._running))
        for index, sequence in enumerate(running := list(self._running)):
            if len(slices) == share or budget == 0:
                break
            if not sequence.is_running or not sequence.num_left:
                continue
            if self._should_pause(sequence, paused):
                paused.append(sequence)
            elif self._grow(sequence, evicted):
                behind = len(running) - index - 1
                slices.append(self._begin_slice(sequence, budget - behind))
                budget -= slices[-1].length
        # What was evicted or paused just now would only push somebody out again.
        admitted = [] if evicted or paused else self._admit(slices, budget)
        self._slices = slices
        known, self._paused = self._paused, {sequence.request_id for sequence in paused}
        return Schedule(slices, admitted, evicted, [each for each in paused if each.request_id not in known])

    def settle(self, slices: list[SequenceSlice]) -> None:
        """Note that the oldest of the passes that are in flight was computed."""
        for part in slices:
            if part.counts:
                part.sequence.num_computed = part.end
                if self._prefixes is not None:
                    self._prefixes.register(part.sequence)

    def withdraw(self, slices: list[SequenceSlice]) -> None:
        """Note that the newest of the passes that are in flight will not be computed."""
        for part in slices:
            if part.counts:
                part.sequence.num_begun = part.start

    def forget_prefixes(self) -> None:
        """Let nobody use what was computed until now, except who uses it already."""
        self.allocator.forget_prefixes()
        for sequence in self._running:
            # What they compute from now on rests on what is forgotten.
            sequence.num_registered = sequence.num_registrable = 0

    def evict_all(self) -> list[Sequence]:
        """Put every running sequence back to the queue; the least urgent first in the result."""
        evicted: list[Sequence] = []
        while self._running:
            self._evict_last(evicted)
        return evicted

    def check_integrity(self) -> None:
        """Assert that blocks and sequences agree."""
        self.allocator.check_integrity(block for sequence in self._running for block in sequence.blocks)
        running = {sequence.request_id: sequence for sequence in self._running}
        assert running.keys().isdisjoint(self._waiting.ids), "a sequence both runs and waits"
        assert len(self._running) <= self.limits.max_requests, "too many sequences run"
        assert self._paused <= running.keys(), "a sequence is paused that does not run"
        kept = sum(len(running[request_id].blocks) for request_id in self._paused)
        assert kept <= self.limits.paused_blocks, "paused sequences own more than they may"
        for sequence in self._running:
            room = len(sequence.blocks) * self.limits.block_size_tokens
            assert sequence.num_computed <= sequence.num_begun, "tokens are computed that no pass began with"
            assert sequence.num_begun <= min(room, len(sequence.tokens)), "computed tokens have no room"
            assert sequence.num_cached <= sequence.num_computed, "skipped tokens are not computed"
        for sequence in self._waiting:
            assert not sequence.blocks, "a waiting sequence owns blocks"
            assert sequence.num_begun == sequence.num_computed == 0, "a waiting sequence has computed tokens"
        self._check_sharing()

    def _share(self, sequences: int) -> int:
        """How many of the sequences one pass takes, so that there are some for each of those that may be in flight."""
        return -(-sequences // self.limits.passes_in_flight)

    def _begin_slice(self, sequence: Sequence, budget: int) -> SequenceSlice:
        part = SequenceSlice.next_of(sequence, budget)
        sequence.num_begun = part.end
        return part

    def _should_pause(self, sequence: Sequence, paused: list[Sequence]) -> bool:
        """True if a running sequence lacks blocks and may wait with what it owns; the most urgent never does."""
        is_first = sequence is self._running.first
        if not self.limits.paused_blocks or is_first or self.allocator.can_allocate(self._missing(sequence)):
            return False
        return sum(len(each.blocks) for each in (*paused, sequence)) <= self.limits.paused_blocks

    def _missing(self, sequence: Sequence) -> int:
        return self.blocks_for(len(sequence.tokens)) - len(sequence.blocks)

    def _grow(self, sequence: Sequence, evicted: list[Sequence]) -> bool:
        """Give a running sequence the blocks that its known tokens need; False if it was evicted itself."""
        missing = self._missing(sequence)
        while not self.allocator.can_allocate(missing):
            if self._evict_last(evicted) is sequence:
                return False
        sequence.blocks += self.allocator.allocate(missing)
        return True

    def _evict_last(self, evicted: list[Sequence]) -> Sequence:
        sequence = self._running.last
        self._running.remove(sequence)
        self._paused.discard(sequence.request_id)
        self._release(sequence)
        self._waiting.add(sequence)
        evicted.append(sequence)
        return sequence

    def _admit(self, slices: list[SequenceSlice], budget: int) -> list[Sequence]:
        admitted: list[Sequence] = []
        upcoming: _Upcoming = {}
        if self._waiting and self._prefixes is not None:
            for sequence in self._running:
                upcoming |= self._prefixes.upcoming(sequence)
        share = self._share(min(len(self._running) + len(self._waiting), self.limits.max_requests))
        while self._waiting and budget > 0 and len(slices) < share and len(self._running) < self.limits.max_requests:
            sequence = self._waiting.first
            matched = self._prefixes.match(sequence) if self._prefixes is not None else []
            if not self._can_admit(sequence, budget, matched) or self._should_wait(sequence, matched, upcoming):
                break
            self._begin(sequence, matched)
            slices.append(self._begin_slice(sequence, budget))
            budget -= slices[-1].length
            admitted.append(sequence)
            if self._prefixes is not None:
                upcoming |= self._prefixes.upcoming(sequence)
        return admitted

    def _can_admit(self, sequence: Sequence, budget: int, matched: list[int]) -> bool:
        uncomputed = len(sequence.tokens) - len(matched) * self.limits.block_size_tokens
        # Only an evicted sequence can be longer than a whole pass without chunking: new ones are refused then.
        may_split = self.limits.chunked_prefill or uncomputed > self.limits.max_tokens
        if uncomputed > budget and not may_split:
            return False
        # One more block for each that runs, or the newcomer would soon be evicted again.
        wanted = self.blocks_for(len(sequence.tokens)) - len(matched) + len(self._running)
        return self.allocator.can_allocate(wanted, besides=matched)

    def _should_wait(self, sequence: Sequence, matched: list[int], upcoming: _Upcoming) -> bool:
        """True if this pass computes the next block that the sequence would have to compute itself."""
        return self._prefixes is not None and self._prefixes.is_next(sequence, len(matched), upcoming)

    def _begin(self, sequence: Sequence, matched: list[int]) -> None:
        self._waiting.remove(sequence)
        self._running.add(sequence)
        if self._prefixes is not None:
            # First of all, or a matched block could be evicted to make room for the others.
            self.allocator.share(matched)
            self._prefixes.begin(sequence, len(matched))
        sequence.blocks = matched + self.allocator.allocate(self.blocks_for(len(sequence.tokens)) - len(matched))
        sequence.num_cached = sequence.num_computed = sequence.num_begun = len(matched) * self.limits.block_size_tokens

    def _release(self, sequence: Sequence) -> None:
        self.allocator.free(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.num_computed = sequence.num_begun = sequence.num_cached = 0
        sequence.life += 1
        sequence.num_registered = sequence.num_registrable = 0

    def _check_sharing(self) -> None:
        """Assert that who owns a block together agrees on all tokens up to its end, which are computed."""
        size = self.limits.block_size_tokens
        users: dict[int, tuple[Sequence, int]] = {}
        for sequence in self._running:
            for index, block in enumerate(sequence.blocks):
                other, place = users.setdefault(block, (sequence, index))
                if other is sequence:
                    continue
                end = (index + 1) * size
                assert place == index, f"block {block} stands at two places"
                assert sequence.tokens[:end] == other.tokens[:end], f"block {block} is shared by different prompts"
                assert min(sequence.num_computed, other.num_computed) >= end, f"block {block} is shared unfinished"
