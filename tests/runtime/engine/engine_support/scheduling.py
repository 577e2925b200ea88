"""Passes of a scheduler without a model, and random histories of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megatron_runtime.config import PrefixCachingEvictionPolicy
from megatron_runtime.engine.scheduling.block_allocator import BlockAllocator
from megatron_runtime.engine.scheduling.prefix_cache import PrefixCache
from megatron_runtime.engine.scheduling.schedule import Schedule, SchedulerLimits
from megatron_runtime.engine.scheduling.scheduler import Scheduler
from megatron_runtime.engine.scheduling.sequence import Sequence, SequenceSlice, SettledPass
from megatron_runtime.engine.scheduling.state_snapshots import StateSnapshots

Compute = Callable[[Schedule], None]
Store = Callable[[SettledPass], None]


def scheduler_of(
    blocks: int,
    *,
    policy: PrefixCachingEvictionPolicy | None = None,
    block_size: int = 4,
    max_requests: int = 8,
    max_tokens: int = 32,
    chunked: bool = True,
    paused_blocks: int = 0,
    passes: int = 1,
    snapshots: int = 0,
    shared_rows: int | None = None,
    prompt_logits: int | None = None,
) -> Scheduler:
    """A scheduler with this number of blocks; with a ``policy`` it shares prefixes, or their ``snapshots``."""
    rows = {"shared_rows": shared_rows, "prompt_logits": prompt_logits}
    limits = SchedulerLimits(max_requests, max_tokens, block_size, chunked, paused_blocks, passes, **rows)
    slots = StateSnapshots(snapshots) if snapshots else None
    cache = None if policy is None else PrefixCache(policy, block_size, slots)
    return Scheduler(limits, BlockAllocator(blocks, cache))


def shares() -> st.SearchStrategy[dict[str, Any]]:
    """Fields of a sequence: its tenant, its body and the answers of the body."""
    bodies = st.sampled_from([(None, 1), ("small", 2), ("large", 9)])
    tenants = st.sampled_from(["", "one", "other"])
    return st.builds(lambda tenant, body: {"tenant": tenant, "body": body[0], "answers": body[1]}, tenants, bodies)


def compute_nothing(_: Schedule) -> None:
    """For tests that don't check the blocks."""


def store_nothing(_: SettledPass) -> None:
    """For tests that don't check recurrent states."""


class Passes:
    """Passes as in the engine: as many as possible are started before the first is settled."""

    def __init__(self, scheduler: Scheduler, compute: Compute = compute_nothing, store: Store = store_nothing) -> None:
        self._scheduler = scheduler
        self._compute = compute
        self._store = store
        self._in_flight: deque[list[SequenceSlice]] = deque()

    def run(self) -> tuple[Schedule, list[Sequence]]:
        """Settles a pass: appends sampled tokens and removes finished requests."""
        schedule = self._scheduler.schedule()
        self._scheduler.check_integrity()
        self._compute(schedule)
        if schedule.slices:
            self._in_flight.append(schedule.slices)
        is_full = len(self._in_flight) == self._scheduler.limits.passes_in_flight
        if self._in_flight and (is_full or not schedule.slices or not self._scheduler.has_idle):
            return schedule, self._settle(self._in_flight.popleft())
        return schedule, []

    def _settle(self, slices: list[SequenceSlice]) -> list[Sequence]:
        self._store(self._scheduler.settle(slices))
        self._scheduler.check_integrity()
        done = []
        for part in slices:
            if part.counts and part.samples:
                part.sequence.tokens.append(7)
                if len(part.sequence.tokens) >= part.sequence.max_length:
                    done.append(part.sequence)
                    self._scheduler.remove(part.sequence)
        self._scheduler.check_integrity()
        return done


def run_pass(scheduler: Scheduler, compute: Compute = compute_nothing) -> tuple[Schedule, list[Sequence]]:
    """One pass of a scheduler that has one in flight."""
    assert scheduler.limits.passes_in_flight == 1
    return Passes(scheduler, compute).run()


class SchedulerLives(RuleBasedStateMachine):
    """Passes and aborts, with invariants after each step and at the end; a test adds the arrival of requests.

    Attributes:
        passes_per_token: Maximum number of passes per token of the remaining requests until all end.
        scheduler: Created by the test's `initialize`.
        passes: Of it.
        alive: The unfinished requests by number.
    """

    passes_per_token: ClassVar[int]
    scheduler: Scheduler
    passes: Passes
    alive: dict[int, Sequence]

    def use(self, scheduler: Scheduler) -> None:
        """Called by the test's `initialize`."""
        self.scheduler = scheduler
        self.passes = Passes(scheduler, self.compute, self.store)
        self.alive = {}

    def compute(self, schedule: Schedule) -> None:
        """The effect of a pass on the blocks."""

    def store(self, settled: SettledPass) -> None:
        """What is to be done after a pass."""

    @rule()
    def make_a_pass(self) -> None:
        schedule, done = self.passes.run()
        assert sum(part.length for part in schedule.slices) <= self.scheduler.limits.max_tokens
        assert len(schedule.slices) <= self.scheduler.limits.max_requests
        assert all(part.length > 0 for part in schedule.slices)
        if (most := self.scheduler.limits.prompt_logits) is not None:
            assert sum(part.num_logits for part in schedule.slices) <= len(schedule.slices) + most
        assert bool(schedule.slices) == bool(self.alive) or self.scheduler.limits.passes_in_flight > 1
        for sequence in done:
            del self.alive[sequence.request_id]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.alive)))
        self.scheduler.remove(self.alive.pop(request_id))

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.alive)

    def teardown(self) -> None:
        """No request starves, and no block stays owned."""
        if not hasattr(self, "scheduler"):
            return
        tokens = sum(sequence.max_length for sequence in self.alive.values())
        for _ in range(tokens * self.passes_per_token * self.scheduler.limits.passes_in_flight):
            for sequence in self.passes.run()[1]:
                del self.alive[sequence.request_id]
        assert not self.alive
        assert self.scheduler.allocator.num_used == 0
