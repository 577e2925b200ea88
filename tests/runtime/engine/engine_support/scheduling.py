"""Passes of a scheduler without a model, and random lives of requests in any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megatron_runtime.config import PrefixCachingEvictionPolicy
from megatron_runtime.engine.scheduling.block_allocator import BlockAllocator
from megatron_runtime.engine.scheduling.prefix_cache import PrefixCache
from megatron_runtime.engine.scheduling.scheduler import Schedule, Scheduler, SchedulerLimits
from megatron_runtime.engine.scheduling.sequence import Sequence, SequenceSlice

Compute = Callable[[Schedule], None]


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
) -> Scheduler:
    """Over so many blocks; with a ``policy`` they are shared by prefixes."""
    limits = SchedulerLimits(max_requests, max_tokens, block_size, chunked, paused_blocks, passes)
    cache = None if policy is None else PrefixCache(policy, block_size)
    return Scheduler(limits, BlockAllocator(blocks, cache))


def compute_nothing(_: Schedule) -> None:
    """For tests that don't look into the blocks."""


class Passes:
    """Passes as the engine makes them: as many as may be are begun before the first of them is settled."""

    def __init__(self, scheduler: Scheduler, compute: Compute = compute_nothing) -> None:
        self._scheduler = scheduler
        self._compute = compute
        self._in_flight: deque[list[SequenceSlice]] = deque()

    def run(self) -> tuple[Schedule, list[Sequence]]:
        """Compute, append a token where one was sampled, forget what is done."""
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
        self._scheduler.settle(slices)
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
    """Passes and aborts, and what must hold after each step and at the end; a test adds how requests come.

    Attributes:
        passes_per_token: Within so many passes per token of what is still alive everything ends.
        scheduler: Made by the test's `initialize`.
        passes: Of it.
        alive: The requests that have not ended, by their numbers.
    """

    passes_per_token: ClassVar[int]
    scheduler: Scheduler
    passes: Passes
    alive: dict[int, Sequence]

    def use(self, scheduler: Scheduler) -> None:
        """To be called by the test's `initialize`."""
        self.scheduler = scheduler
        self.passes = Passes(scheduler, self.compute)
        self.alive = {}

    def compute(self, schedule: Schedule) -> None:
        """What a pass does with the blocks."""

    @rule()
    def make_a_pass(self) -> None:
        schedule, done = self.passes.run()
        assert sum(part.length for part in schedule.slices) <= self.scheduler.limits.max_tokens
        assert len(schedule.slices) <= self.scheduler.limits.max_requests
        assert all(part.length > 0 for part in schedule.slices)
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
        """Nobody starves, and nothing stays owned."""
        if not hasattr(self, "scheduler"):
            return
        tokens = sum(sequence.max_length for sequence in self.alive.values())
        for _ in range(tokens * self.passes_per_token * self.scheduler.limits.passes_in_flight):
            for sequence in self.passes.run()[1]:
                del self.alive[sequence.request_id]
        assert not self.alive
        assert self.scheduler.allocator.num_used == 0
