"""Logs the engine's load at an interval of steps."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from megatron_runtime.engine.context import DynamicInferenceContext
    from megatron_runtime.engine.scheduling.block_allocator import BlockAllocator
    from megatron_runtime.engine.scheduling.scheduler import Scheduler
    from megatron_runtime.engine.step_result import EngineStats, StepResult

_logger = logging.getLogger(__name__)

Figures = dict[str, int | float]


class Writer(Protocol):
    """Receives the figures besides the log; the module wandb is one."""

    def log(self, figures: Figures, /) -> Any: ...


class Observed(Protocol):
    """The part of an engine that is logged."""

    @property
    def context(self) -> DynamicInferenceContext: ...
    @property
    def scheduler(self) -> Scheduler: ...
    def stats(self) -> EngineStats: ...


class StepLog:
    """Writes the load of an engine to the log and to a writer.

    Args:
        interval: Steps between two lines; 0 disables them.
        writer: Receives the figures by Megatron's names with the prefix ``inference/``; may be None. Its errors are
            logged and do not affect the engine.
    """

    def __init__(self, interval: int, writer: Writer | None) -> None:
        self._interval = interval
        self._writer = writer
        self._steps = 0
        self._finished = 0

    def note_step(self, engine: Observed, result: StepResult) -> bool:
        """Count a step, and log at the interval. Returns whether it has logged."""
        if self._interval == 0:
            return False
        self._steps += 1
        self._finished += len(result["finished_request_records"])
        if self._steps % self._interval:
            return False
        figures = self._figures(engine, result["step_time"])
        _logger.info(_line(figures, engine.stats(), self._finished))
        if self._writer is not None:
            self._write(self._writer, {f"inference/{name}": value for name, value in figures.items()})
        return True

    def _write(self, writer: Writer, figures: Figures) -> None:
        try:
            writer.log(figures)
        except Exception:
            _logger.warning("the figures of step %d could not be written", self._steps, exc_info=True)

    def _figures(self, engine: Observed, step_time: float) -> Figures:
        stats = engine.stats()
        return {
            "inference_step": self._steps,
            "step_time_s": step_time,
            "waiting_queue_len": stats.waiting,
            "total_requests_dict_size": stats.running + stats.waiting,
            "active_request_count": stats.running - stats.paused,
            "paused_request_count": stats.paused,
            "total_request_count": stats.running,
            "max_requests": engine.context.max_requests,
            "active_token_count": engine.scheduler.num_scheduled_tokens,
            **_block_figures(engine.context.allocator),
            **_prefix_figures(stats, engine.context.block_size_tokens),
        }


def _block_figures(allocator: BlockAllocator) -> Figures:
    """Allocated blocks have contents; a request owns each active block."""
    allocated = allocator.num_used + allocator.num_evictable
    return {
        "total_blocks": allocator.num_blocks,
        "allocated_blocks": allocated,
        "active_unique_blocks": allocator.num_used,
        "allocated_utilization": 100 * allocated / allocator.num_blocks,
        "active_utilization": 100 * allocator.num_used / allocator.num_blocks,
        "block_count_avail": allocator.num_free,
    }


def _prefix_figures(stats: EngineStats, block_size_tokens: int) -> Figures:
    return {
        "prefix_cache_hits": stats.prefix_hits_total,
        "prefix_cache_blocks_matched": stats.cached_tokens_total // block_size_tokens,
        "prefix_cache_prompt_tokens_computed": stats.prompt_tokens_total - stats.cached_tokens_total,
        "prefix_cache_prompt_tokens_skipped": stats.cached_tokens_total,
    }


def _line(figures: Figures, stats: EngineStats, finished: int) -> str:
    return (
        f"step {figures['inference_step']}: {1000 * figures['step_time_s']:.1f} ms, "
        f"{figures['active_token_count']} tokens, requests: {figures['active_request_count']} active, "
        f"{stats.paused} paused, {stats.waiting} waiting, {finished} finished, {stats.evictions_total} evictions, "
        f"blocks: {figures['active_unique_blocks']} owned, {stats.kv_blocks_evictable} cached, "
        f"{stats.kv_blocks_total} in all, prefix hits: {stats.prefix_hits_total}"
    )
