"""A replica group of several ranks as one engine: all ranks execute the actions of the first rank in the same order."""

from __future__ import annotations

import asyncio
import copy
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import torch

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.admission import Prompt
from megatron_runtime.engine.request_book import Reports
from megatron_runtime.engine.request_future import RequestFuture
from megatron_runtime.engine.step_result import EngineStats, StepResult
from megatron_runtime.engine.worker.engine_loop import EngineLoop
from megatron_runtime.engine.worker.protocol import RankEngine
from megatron_runtime.errors import CheckpointError, ConfigurationError
from megatron_runtime.inference_request import DynamicInferenceRequest
from megatron_runtime.model.refit import Weights
from megatron_runtime.parallel.ranks import Ranks
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire.items import AdapterEntry

T = TypeVar("T")

HEARTBEAT_SECONDS = 5.0
"""Interval of the first rank's heartbeats while it is idle; they detect lost ranks."""


class Action(StrEnum):
    """What all ranks execute together. Those of a signal have its name."""

    STEP = "step"
    SUSPEND = "suspend"
    RESUME = "resume"
    UPDATE_WEIGHTS = "update weights"
    ASSIGN_ADAPTERS = "assign adapters"
    BARRIER = "barrier"
    START_PROFILER = "start profiler"
    STOP_PROFILER = "stop profiler"
    LEAVE = "leave"


class Change(StrEnum):
    """What changes the requests between two actions."""

    GRAMMAR = "grammar"
    END_OF_GRAMMAR = "end of grammar"
    ADD = "add"
    ABORT = "abort"
    EPOCH = "epoch"
    STALENESS = "staleness"
    PREFIXES = "prefixes"


class LockStepEngine:
    """The engine of a replica group's first rank, as a coordinator's loop uses it; followers call `run_follower`.

    Requests and aborts change this rank's engine at once. The next action - a step, or a change of the engine's state -
    sends them to the followers, which apply them in the same order before they execute the same action. So all ranks
    compute the same schedules; only actions wait for other ranks.

    One thread may execute actions while another adds requests between them, as the loop does.

    Args:
        engine: The engine of this rank.
        ranks: The replica group.
        accepts_tensors: Whether every rank gets the tensors of new weights from its caller, as this one does.

    Raises:
        ConfigurationError: The engine has a ``request_timeout``; ranks have no common clock.
    """

    def __init__(self, engine: RankEngine, ranks: Ranks, *, accepts_tensors: bool = False) -> None:
        refuse_request_timeout(engine.config)
        self._accepts_tensors = accepts_tensors
        self.config = engine.config
        self._engine = engine
        self._ranks = ranks
        self._changes: list[Any] = []
        self._action = threading.Lock()

    def add_request(
        self,
        request_id: int,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        generated: Sequence[int] = (),
    ) -> RequestFuture:
        """As DynamicInferenceEngine does."""
        params = SamplingParams() if sampling_params is None else copy.copy(sampling_params)
        if params.seed is None:
            params.seed = secrets.randbits(63)
        tokens = prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt
        self._changes.append((Change.ADD, request_id, tokens, params.serialize(), list(generated)))
        return self._engine.add_request(request_id, prompt, params, generated=generated)

    def compile_grammar(self, grammar: str) -> Future[Any]:
        """As DynamicInferenceEngine does; the other ranks begin with the next action."""
        self._changes.append((Change.GRAMMAR, grammar))
        return self._engine.compile_grammar(grammar)

    def release_grammar(self, grammar: str) -> None:
        """As DynamicInferenceEngine does."""
        self._changes.append((Change.END_OF_GRAMMAR, grammar))
        self._engine.release_grammar(grammar)

    def abort_request(self, request_id: int) -> bool:
        """As DynamicInferenceEngine does."""
        self._changes.append((Change.ABORT, request_id))
        return self._engine.abort_request(request_id)

    def set_generation_epoch(self, epoch: int) -> None:
        """As DynamicInferenceEngine does."""
        self._changes.append((Change.EPOCH, epoch))
        self._engine.set_generation_epoch(epoch)

    def increment_staleness(self) -> None:
        """As DynamicInferenceEngine does."""
        self._changes.append((Change.STALENESS, 0))
        self._engine.increment_staleness()

    def invalidate_prefix_cache(self) -> None:
        """As DynamicInferenceEngine does."""
        self._changes.append((Change.PREFIXES, 0))
        self._engine.invalidate_prefix_cache()

    def note_finished(self, request: DynamicInferenceRequest) -> None:
        """As DynamicInferenceEngine does; only this rank has a ledger."""
        self._engine.note_finished(request)

    def start_profiler(self) -> None:
        """All ranks begin a trace; LostRankError names lost and late ranks."""
        self._execute(self._engine.start_profiler, Action.START_PROFILER)

    def stop_profiler(self) -> object:
        """All ranks write their trace; LostRankError names lost and late ranks."""
        return self._execute(self._engine.stop_profiler, Action.STOP_PROFILER)

    def has_unfinished_requests(self) -> bool:
        """As DynamicInferenceEngine does."""
        return self._engine.has_unfinished_requests()

    def pop_reports(self) -> Reports:
        """As DynamicInferenceEngine does."""
        return self._engine.pop_reports()

    def stats(self) -> EngineStats:
        """As DynamicInferenceEngine does."""
        return self._engine.stats()

    def fail_all_requests(self, error: Exception) -> None:
        """As DynamicInferenceEngine does, on this rank only: the replica group is about to end."""
        self._engine.fail_all_requests(error)

    def step_modern(self) -> StepResult:
        """As DynamicInferenceEngine does; LostRankError names lost and late ranks."""
        return self._execute(self._engine.step_modern, Action.STEP)

    def suspend(self) -> None:
        """All ranks release memory; LostRankError names lost and late ranks."""
        self._execute(lambda: suspend_together(self._engine, self._ranks), Action.SUSPEND)

    def resume(self) -> None:
        """All ranks allocate their memory again; LostRankError names lost and late ranks."""
        self._execute(lambda: resume_together(self._engine, self._ranks), Action.RESUME)

    def barrier(self, occasion: str) -> None:
        """Wait until all ranks have executed all earlier actions; LostRankError names lost and late ranks."""
        self._execute(lambda: barrier_together(self._engine, self._ranks, occasion), Action.BARRIER, occasion)

    def update_weights(self, weights: Weights, *, version: int | None = None) -> int:
        """As DynamicInferenceEngine does, from files that all ranks can read, or tensors that every rank gets.

        Raises:
            CheckpointError: They don't fit on a rank, and no rank has loaded them; or they are tensors, and the other
                ranks get none.
        """
        path = str(weights) if isinstance(weights, str | Path) else None
        if path is None and not self._accepts_tensors:
            raise CheckpointError("a replica group of several ranks loads weights from files; give their path")
        return self._execute(
            lambda: self._engine.update_weights(weights, version=version), Action.UPDATE_WEIGHTS, path, version
        )

    @property
    def own_adapters(self) -> Sequence[tuple[str, str]]:
        """As DynamicInferenceEngine does."""
        return self._engine.own_adapters

    def assign_adapters(self, entries: Sequence[AdapterEntry]) -> None:
        """As EngineAdapters.assign; CheckpointError if a rank can't load one, and no rank has changed its adapters."""
        content = [list(entry) for entry in entries]
        self._execute(lambda: self._engine.assign_adapters(entries), Action.ASSIGN_ADAPTERS, content)

    def release_followers(self) -> None:
        """End the followers; there are no actions after it."""
        self._execute(lambda: None, Action.LEAVE)

    def disconnect(self) -> None:
        """Close the connections after the current action, without a message; the followers fail."""
        with self._action:
            self._ranks.close()

    async def send_heartbeats(self) -> None:
        """Send heartbeats to idle ranks until cancelled; LostRankError when one of them is lost."""
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            await asyncio.to_thread(self._send_heartbeat)

    def _send_heartbeat(self) -> None:
        if self._action.acquire(blocking=False):  # during an action no rank waits for a heartbeat
            try:
                self._ranks.share_inbox(b"")
            finally:
                self._action.release()

    def _execute(self, act: Callable[[], T], *action: Any) -> T:
        with self._action:
            changes, self._changes = self._changes, []
            self._ranks.share_inbox(msgpack.packb((changes, action)))
            return act()


async def run_in_lock_step(loop: EngineLoop, engine: LockStepEngine) -> None:
    """Run the loop of this engine, and release the followers when it ends.

    Raises:
        EngineError: The loop failed, or ranks were lost or late while it was idle (LostRankError). The loop has the
            error as its failure, and the followers were not released.
    """
    work, heartbeats = asyncio.create_task(loop.run()), asyncio.create_task(engine.send_heartbeats())
    try:
        await asyncio.wait({work, heartbeats}, return_when=asyncio.FIRST_COMPLETED)
        if heartbeats.done():
            loop.failure = heartbeats.exception()
    finally:
        for task in (heartbeats, work):
            task.cancel()
        ends = await asyncio.gather(heartbeats, work, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    await asyncio.to_thread(engine.release_followers)


def refuse_request_timeout(config: InferenceConfig) -> None:
    """Raise ConfigurationError if a replica group of several ranks has a request timeout."""
    if config.request_timeout is not None:
        raise ConfigurationError(
            f"request_timeout={config.request_timeout}: the ranks of a replica group have no common clock; omit "
            "it, and set it for the coordinator",
            field="request_timeout",
        )


def barrier_together(engine: RankEngine, ranks: Ranks, occasion: str) -> None:
    """Wait until all ranks have done their earlier work."""
    engine.barrier(occasion)
    ranks.barrier(occasion)


def suspend_together(engine: RankEngine, ranks: Ranks) -> None:
    """Release the memory of this rank, and wait for the others."""
    engine.suspend()
    ranks.barrier("suspend")


def resume_together(engine: RankEngine, ranks: Ranks) -> None:
    """Allocate the memory of this rank again, and wait for the others."""
    engine.resume()
    ranks.barrier("resume")
