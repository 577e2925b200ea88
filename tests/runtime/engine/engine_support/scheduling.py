"""Passes of a scheduler without a model, and random lives of requests in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megatron_runtime.config import PrefixCachingEvictionPolicy
from megatron_runtime.engine.block_allocator import BlockAllocator
from megatron_runtime.engine.prefix_cache import PrefixCache
from megatron_runtime.engine.scheduler import Schedule, Scheduler, SchedulerLimits
from megatron_runtime.engine.sequence import Sequence

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
) -> Scheduler:
    """Over so many blocks; with a ``policy`` they are shared by prefixes."""
    limits = SchedulerLimits(max_requests, max_tokens, block_size, chunked, paused_blocks)
    cache = None if policy is None else PrefixCache(policy, block_size)
    return Scheduler(limits, BlockAllocator(blocks, cache))


def compute_nothing(_: Schedule) -> None:
    """For tests that don't look into the blocks."""


def run_pass(scheduler: Scheduler, compute: Compute = compute_nothing) -> tuple[Schedule, list[Sequence]]:
    """One pass as the engine makes it: compute, append a token where one is sampled, forget what is done."""
    schedule = scheduler.schedule()
    scheduler.check_integrity()
    compute(schedule)
    scheduler.settle(schedule)
    scheduler.check_integrity()
    done = []
    for part in schedule.slices:
        if part.samples:
            part.sequence.tokens.append(7)
            if len(part.sequence.tokens) >= part.sequence.max_length:
                done.append(part.sequence)
                scheduler.remove(part.sequence)
    scheduler.check_integrity()
    return schedule, done


class SchedulerLives(RuleBasedStateMachine):
    """Passes and aborts, and what must hold after each step and at the end; a test adds how requests come.

    Attributes:
        passes_per_token: Within so many passes per token of what is still alive everything ends.
        scheduler: Made by the test's `initialize`.
        alive: The requests that have not ended, by their numbers.
    """

    passes_per_token: ClassVar[int]
    scheduler: Scheduler
    alive: dict[int, Sequence]

    def compute(self, schedule: Schedule) -> None:
        """What a pass does with the blocks."""

    @rule()
    def make_a_pass(self) -> None:
        schedule, done = run_pass(self.scheduler, self.compute)
        assert sum(part.length for part in schedule.slices) <= self.scheduler.limits.max_tokens
        assert len(schedule.slices) <= self.scheduler.limits.max_requests
        assert all(part.length > 0 for part in schedule.slices)
        assert bool(schedule.slices) == bool(self.alive)
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
        for _ in range(sum(self.passes_per_token * sequence.max_length for sequence in self.alive.values())):
            for sequence in run_pass(self.scheduler, self.compute)[1]:
                del self.alive[sequence.request_id]
        assert not self.alive
        assert self.scheduler.allocator.num_used == 0
