"""Chooses the tokens that the next forward pass computes."""

from __future__ import annotations

from collections.abc import Sequence as Slices

from megatron_runtime.engine.scheduling.block_allocator import BlockAllocator
from megatron_runtime.engine.scheduling.goodput import Goodput
from megatron_runtime.engine.scheduling.integrity import check_integrity
from megatron_runtime.engine.scheduling.mask_budget import held_back
from megatron_runtime.engine.scheduling.next_slices import NextSlices
from megatron_runtime.engine.scheduling.preemption import to_preempt
from megatron_runtime.engine.scheduling.row_shares import RowShares, RowSharing
from megatron_runtime.engine.scheduling.running_sequences import RunningSequences
from megatron_runtime.engine.scheduling.schedule import Schedule, SchedulerLimits
from megatron_runtime.engine.scheduling.sequence import Sequence, SequenceSlice, SettledPass
from megatron_runtime.engine.scheduling.speculation import with_drafts
from megatron_runtime.engine.scheduling.virtual_time import VirtualTime
from megatron_runtime.engine.scheduling.waiting_sequences import WaitingSequences

_Upcoming = dict[int, tuple[int, ...]]
"""Hashes and tokens of the blocks that will be registered after a pass."""


class Scheduler:
    """By priority, then fairly, over a fixed pool of blocks; pure bookkeeping.

    The order of equal priorities is that of the tags, see VirtualTime, and of equal tags that of arrival. Of the
    tenants in the queue, the one with the fewest running sequences is served next. If there is no room for it, those
    sequences make room that are beyond an equal share, see `RunningSequences.excess`. A running sequence is not evicted
    for a higher priority in the queue.

    Every running sequence gets at least one token in every pass, or, with several passes in flight, in one of them:
    each pass computes its share of the most urgent sequences that do not wait for their next token. Sequences with slow
    masks of grammars take turns, and so do those of large bodies beside small ones, see `RowSharing`. When the pool is
    exhausted, a sequence that needs a block pauses and keeps its blocks, as far as the limits allow; otherwise the
    least urgent running sequence of the largest tenant is evicted. In both cases the most urgent one proceeds, and no
    sequence is admitted meanwhile. As long as each single sequence fits the pool (which the engine checks on
    submission), all of them end, unless ones of a higher priority arrive forever.

    Passes are computed in the order of their schedules, so that freed blocks can be allocated again at once: the next
    owner writes to them later. The results of a pass for a sequence that has lost its blocks meanwhile are dropped.

    With a prefix cache, a sequence begins after the known prefix of its tokens. Only whole blocks are skipped, and
    never the last token, so that no sequence writes to a shared block. A sequence whose next block is being computed
    for another one waits for it. With recurrent layers, sequences begin at snapshots of their states: a slice ends
    where a sequence leaves one, and other sequences that can begin there wait for it.
    """

    def __init__(self, limits: SchedulerLimits, allocator: BlockAllocator) -> None:
        self.limits = limits
        self.allocator = allocator
        self.goodput = Goodput() if limits.shares_times and limits.passes_in_flight == 1 else None
        """What drafts cost and yield; None: times of passes, which may overlap, do not tell."""
        self._prefixes = allocator.prefixes
        self._running = RunningSequences()
        self._waiting = WaitingSequences(self._running)
        self._sharing = RowSharing(self._running, self._waiting)
        self._time = VirtualTime()
        self._arrivals = 0
        self._paused: set[int] = set()
        self._slices: list[SequenceSlice] = []
        self._next = NextSlices(allocator, limits.block_size_tokens)
        self._passes = 0

    @property
    def num_running(self) -> int:
        """Number of running sequences, which own blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of sequences in the queue."""
        return len(self._waiting)

    @property
    def num_paused(self) -> int:
        """Number of running sequences that got no token in the last pass because they lack a block."""
        return len(self._paused)

    @property
    def has_idle(self) -> bool:
        """True if another pass could compute tokens before those in flight are settled."""
        return bool(self._waiting) or any(sequence.num_left for sequence in self._running)

    @property
    def may_admit(self) -> bool:
        """True if a sequence is in the queue for which there is a place, or can be made one."""
        if not self._waiting:
            return False
        return len(self._running) < self.limits.max_requests or self._running.has_excess(self._waiting.first)

    @property
    def num_scheduled_tokens(self) -> int:
        """Number of tokens of the last pass."""
        return sum(part.length for part in self._slices)

    @property
    def running_ids(self) -> list[int]:
        """Request ids of the running sequences, the most urgent first."""
        return self._running.ids

    def __contains__(self, sequence: Sequence) -> bool:
        """True if the sequence runs or waits."""
        return sequence in self._running or sequence in self._waiting

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks for this number of tokens."""
        return -(-num_tokens // self.limits.block_size_tokens)

    def can_ever_fit(self, sequence: Sequence) -> bool:
        """True if the empty pool has room for the whole sequence; its last token is never computed."""
        longest = max(len(sequence.tokens), sequence.max_length - 1)
        return self.blocks_for(longest) <= self.allocator.num_blocks

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence to the queue."""
        assert self.can_ever_fit(sequence), f"request {sequence.request_id} never fits the pool"
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._time.enter(sequence)
        self._waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a running or waiting sequence, and free its blocks."""
        self._paused.discard(sequence.request_id)
        (self._running if sequence in self._running else self._waiting).remove(sequence)
        self._time.leave(sequence)
        self._release(sequence)

    def schedule(self, *, admits: bool = True) -> Schedule:
        """Schedule the next pass: allocates, pauses, evicts and, if it ``admits``, lets sequences leave the queue."""
        evicted: list[Sequence] = []
        paused: list[Sequence] = []
        limits = self.limits
        self._passes += 1
        shares = self._sharing.rows(self._passes, limits.shared_rows, admits=admits)
        running = shares.among(self._running)
        held = held_back(running, limits.mask_milliseconds)
        slices = self._next.begin([] if held else running, self._passes)
        budget = limits.max_tokens - len(slices)
        is_prepared = bool(slices)
        if not is_prepared:
            slices, budget = self._continue(running, held, evicted, paused)
        admitted = self._admit(slices, budget, evicted, shares, is_full=bool(evicted or paused)) if admits else []
        if evicted:
            slices = [part for part in slices if part.counts]
            paused = [each for each in paused if each.is_running]
        if not is_prepared or admitted:  # Slices were prepared only if there are no drafts.
            slices = with_drafts(slices, shares, self.goodput, limits)
        self._slices = slices
        known, self._paused = self._paused, {sequence.request_id for sequence in paused}
        paused = [each for each in paused if each.request_id not in known]
        return Schedule(slices, admitted, evicted, paused)

    def settle(self, slices: list[SequenceSlice]) -> SettledPass:
        """Record that the oldest pass in flight was computed."""
        settled = SettledPass([], [])
        for part in slices:
            sequence = part.sequence
            if part.num_evictions == sequence.num_evictions:  # faster than `counts`
                sequence.num_computed = part.end
                if self._prefixes is not None:
                    if self.allocator.register(sequence):
                        settled.replaced.append(sequence)
                    if (slot := self._prefixes.snapshot(sequence)) is not None:
                        settled.snapshots.append((sequence, slot))
        return settled

    def accept_draft(self, sequence: Sequence) -> None:
        """Record that the first draft after the computed tokens was right, and is computed."""
        sequence.num_computed += 1
        sequence.num_begun += 1

    def reserve_next(self, slices: Slices[SequenceSlice]) -> tuple[list[SequenceSlice], list[int]]:
        """The slices of the pass after one that samples a token of each of these sequences, with blocks for them; and
        the places among ``slices`` of sequences that end with that token, which have none.

        There are no slices if blocks are missing, or if there may be drafts.
        """
        return self._next.reserve(slices)

    def withdraw(self, slices: list[SequenceSlice]) -> None:
        """Record that the newest pass in flight will not be computed."""
        for part in slices:
            if part.counts:
                part.sequence.num_begun = part.start

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; running sequences keep their blocks."""
        self.allocator.forget_prefixes()
        for sequence in self._running:
            # Their later blocks depend on blocks that are not registered any more.
            sequence.forget_prefixes()

    def evict_all(self) -> list[Sequence]:
        """Return every running sequence to the queue; the result has the least urgent one first."""
        evicted: list[Sequence] = []
        while self._running:
            self._evict(self._running.last, evicted)
        return evicted

    def check_integrity(self) -> None:
        """Assert that blocks and sequences are consistent."""
        check_integrity(self.allocator, self._running, self._waiting, self._paused, self.limits)

    def _continue(
        self, running: list[Sequence], held: set[int], evicted: list[Sequence], paused: list[Sequence]
    ) -> tuple[list[SequenceSlice], int]:
        """Slices of running sequences, as far as they have room, and the number of tokens that are left."""
        slices: list[SequenceSlice] = []
        limits, budget, size = self.limits, self.limits.max_tokens, self.limits.block_size_tokens
        share = self._share(len(self._running))
        for index, sequence in enumerate(running):
            if len(slices) == share or budget == 0:
                break
            if not sequence.blocks or not sequence.num_left or sequence.request_id in held:
                continue
            if limits.paused_blocks and self._should_pause(sequence, paused):
                paused.append(sequence)
            # Nearly every sequence has room, and is not worth a call in each pass.
            elif len(sequence.tokens) <= len(sequence.blocks) * size or self._grow(sequence, evicted):
                num_behind = len(running) - index - 1
                slices.append(self._begin_slice(sequence, budget - num_behind, slices))
                budget -= slices[-1].length
        return slices, budget

    def _share(self, sequences: int) -> int:
        """Number of sequences per pass, so that each pass in flight has some."""
        return -(-sequences // self.limits.passes_in_flight)

    def _begin_slice(self, sequence: Sequence, budget: int, others: list[SequenceSlice]) -> SequenceSlice:
        """The slice of a sequence in a pass with room for ``budget`` tokens besides those of the other slices."""
        logits = self.limits.prompt_logits
        if logits is not None and sequence.next_log_prob is not None and sequence.num_left > 1:
            logits -= sum(part.num_prompt_logits for part in others)
        part = SequenceSlice.next_of(sequence, budget, logits)
        sequence.num_begun, sequence.last_pass = part.end, self._passes
        return part

    def _should_pause(self, sequence: Sequence, paused: list[Sequence]) -> bool:
        """True if a running sequence lacks blocks and may wait with its own; never for the most urgent one."""
        is_first = sequence is self._running.first
        if is_first or self.allocator.can_allocate(self._missing(sequence)):
            return False
        return sum(len(each.blocks) for each in (*paused, sequence)) <= self.limits.paused_blocks

    def _missing(self, sequence: Sequence) -> int:
        return self.blocks_for(len(sequence.tokens)) - len(sequence.blocks)

    def _grow(self, sequence: Sequence, evicted: list[Sequence]) -> bool:
        """Allocate the blocks that the known tokens of a running sequence need; False if it was evicted itself."""
        missing = self._missing(sequence)
        while not self.allocator.can_allocate(missing):
            if self._evict(self._running.to_evict, evicted) is sequence:
                return False
        sequence.blocks += self.allocator.allocate(missing)
        return True

    def _evict(self, sequence: Sequence, evicted: list[Sequence]) -> Sequence:
        self._running.remove(sequence)
        self._paused.discard(sequence.request_id)
        self._release(sequence)
        self._waiting.add(sequence)
        evicted.append(sequence)
        return sequence

    def _admit(
        self, slices: list[SequenceSlice], budget: int, evicted: list[Sequence], shares: RowShares, *, is_full: bool
    ) -> list[Sequence]:
        """Begin sequences of the queue; those that were ``evicted`` in this pass are left for the next one. If memory
        ``is_full``, only in place of others: the admitted ones would evict others otherwise."""
        admitted: list[Sequence] = []
        upcoming = self._upcoming()
        share = self._share(min(len(self._running) + len(self._waiting), self.limits.max_requests))
        while budget > 0 and self.may_admit:
            sequence = self._waiting.first
            matched = self._match(sequence)
            has_to_wait = sequence in evicted or shares.delays(sequence, len(slices))
            if has_to_wait or self._should_wait(sequence, matched, upcoming):
                break
            if is_full or not self._has_room(sequence, matched):
                preempted = self._to_preempt(sequence, matched)
                if not preempted or not set(preempted).isdisjoint(admitted):
                    break
                for each in preempted:
                    self._evict(each, evicted)
                budget += sum(part.length for part in slices if not part.counts)
                slices[:] = [part for part in slices if part.counts]
                upcoming = self._upcoming()
            if len(slices) >= share or not self._fits(sequence, budget, matched):
                break
            self._begin(sequence, matched)
            slices.append(self._begin_slice(sequence, budget, slices))
            budget -= slices[-1].length
            admitted.append(sequence)
            if self._prefixes is not None:
                upcoming |= self._prefixes.upcoming(sequence)
        return admitted

    def _upcoming(self) -> _Upcoming:
        upcoming: _Upcoming = {}
        if self._waiting and self._prefixes is not None:
            for sequence in self._running:
                upcoming |= self._prefixes.upcoming(sequence)
        return upcoming

    def _fits(self, sequence: Sequence, budget: int, matched: list[int]) -> bool:
        """True if a pass has enough tokens left for a sequence of the queue."""
        uncomputed = len(sequence.tokens) - len(matched) * self.limits.block_size_tokens
        # Without chunking only an evicted sequence can be longer than a pass: new ones are refused.
        return uncomputed <= budget or self.limits.chunked_prefill or uncomputed > self.limits.max_tokens

    def _has_room(self, sequence: Sequence, matched: list[int]) -> bool:
        """True if there are a place and blocks for a sequence of the queue."""
        has_place = len(self._running) < self.limits.max_requests
        return has_place and self.allocator.can_allocate(self._needed(sequence, matched), besides=matched)

    def _needed(self, sequence: Sequence, matched: list[int]) -> int:
        # One more block for each running sequence, or the new one would soon be evicted.
        return self.blocks_for(len(sequence.tokens)) - len(matched) + len(self._running)

    def _to_preempt(self, sequence: Sequence, matched: list[int]) -> list[Sequence]:
        needed, most = self._needed(sequence, matched), self.limits.max_requests
        return to_preempt(sequence, matched, self._running, self.allocator, num_needed=needed, max_requests=most)

    def _match(self, sequence: Sequence) -> list[int]:
        return [] if self._prefixes is None else self._prefixes.match(sequence)

    def _should_wait(self, sequence: Sequence, matched: list[int], upcoming: _Upcoming) -> bool:
        """True if a pass in flight or this one computes the next block of the sequence."""
        return self._prefixes is not None and self._prefixes.is_next(sequence, len(matched), upcoming)

    def _begin(self, sequence: Sequence, matched: list[int]) -> None:
        self._waiting.remove(sequence)
        self._running.add(sequence)
        if self._prefixes is not None:
            # First, or a matched block could be evicted by the allocation of the others.
            self.allocator.share(matched)
            self._prefixes.begin(sequence, matched)
        sequence.blocks = matched + self.allocator.allocate(self.blocks_for(len(sequence.tokens)) - len(matched))
        sequence.num_cached = sequence.num_computed = sequence.num_begun = len(matched) * self.limits.block_size_tokens

    def _release(self, sequence: Sequence) -> None:
        self.allocator.free(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.num_computed = sequence.num_begun = sequence.num_cached = 0
        sequence.num_evictions += 1
        sequence.forget_prefixes()
        sequence.first_snapshot = None
