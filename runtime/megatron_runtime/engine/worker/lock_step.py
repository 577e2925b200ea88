"""A replica of several ranks as one engine: what its first rank is told, all of them do in the same order."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import secrets
import threading
from collections.abc import Callable, Sequence
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
from megatron_runtime.model.refit import Weights
from megatron_runtime.parallel.ranks import Ranks
from megatron_runtime.sampling_params import SamplingParams

T = TypeVar("T")
OnTurn = Callable[[str, list[Any], CheckpointError | None], None]

BEAT_SECONDS = 5.0
"""Between two signs of life of an idle first rank: a rank that is lost meanwhile is noticed then."""


class Turn(StrEnum):
    """What all ranks do together."""

    STEP = "step"
    SUSPEND = "suspend"
    RESUME = "resume"
    UPDATE_WEIGHTS = "update weights"
    BARRIER = "barrier"
    LEAVE = "leave"


class _News(StrEnum):
    """What comes in before a turn."""

    ADD = "add"
    ABORT = "abort"


class LockStepEngine:
    """The engine of a replica's first rank, as a coordinator's loop uses it; the other ranks `follow`.

    Requests and aborts are carried out here at once, and noted. The next turn - a step, or a change of the engine's
    state - shares them with the other ranks, which carry them out in the same order before they do the same. So all
    ranks make the same schedules; only a turn waits for anybody.

    Turns may be made in one thread while another adds requests between them, as the loop does.

    Args:
        engine: This rank's own.
        ranks: The replica.
        takes_tensors: Whether the other ranks are given the tensors of new weights as this one is.

    Raises:
        ConfigurationError: The engine has a ``request_timeout``; ranks have no clock in common.
    """

    def __init__(self, engine: RankEngine, ranks: Ranks, *, takes_tensors: bool = False) -> None:
        refuse_request_timeout(engine.config)
        self._takes_tensors = takes_tensors
        self.config = engine.config
        self._engine = engine
        self._ranks = ranks
        self._news: list[Any] = []
        self._turn = threading.Lock()

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
        given = prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt
        self._news.append((_News.ADD, request_id, given, params.serialize(), list(generated)))
        return self._engine.add_request(request_id, prompt, params, generated=generated)

    def abort_request(self, request_id: int) -> bool:
        """As DynamicInferenceEngine does."""
        self._news.append((_News.ABORT, request_id))
        return self._engine.abort_request(request_id)

    def has_unfinished_requests(self) -> bool:
        """As DynamicInferenceEngine does."""
        return self._engine.has_unfinished_requests()

    def take_reports(self) -> Reports:
        """As DynamicInferenceEngine does."""
        return self._engine.take_reports()

    def stats(self) -> EngineStats:
        """As DynamicInferenceEngine does."""
        return self._engine.stats()

    def fail_all_requests(self, error: Exception) -> None:
        """As DynamicInferenceEngine does, on this rank alone: the replica is at its end."""
        self._engine.fail_all_requests(error)

    def step_modern(self) -> StepResult:
        """As DynamicInferenceEngine does; LostRankError names ranks that are gone or late."""
        return self._take_turn(self._engine.step_modern, Turn.STEP)

    def suspend(self) -> None:
        """All ranks give memory back; LostRankError names those that don't in time."""
        self._take_turn(lambda: _suspend(self._engine, self._ranks), Turn.SUSPEND)

    def resume(self) -> None:
        """All ranks take their memory again; LostRankError names those that don't in time."""
        self._take_turn(lambda: _resume(self._engine, self._ranks), Turn.RESUME)

    def barrier(self, occasion: str) -> None:
        """Wait until all ranks have done all that came before; LostRankError names those that haven't in time."""
        self._take_turn(lambda: _barrier(self._engine, self._ranks, occasion), Turn.BARRIER, occasion)

    def update_weights(self, weights: Weights, *, version: int | None = None) -> int:
        """As DynamicInferenceEngine does, from files that all ranks see, or tensors that all are given.

        Raises:
            CheckpointError: They don't fit on some rank, and no rank has taken them; or they are no files, and the
                other ranks are given no tensors.
        """
        path = str(weights) if isinstance(weights, str | Path) else None
        if path is None and not self._takes_tensors:
            raise CheckpointError("a replica of several ranks takes weights from files; give their path")
        return self._take_turn(
            lambda: self._engine.update_weights(weights, version=version), Turn.UPDATE_WEIGHTS, path, version
        )

    def release_followers(self) -> None:
        """Let the other ranks go; nothing may come after it."""
        self._take_turn(lambda: None, Turn.LEAVE)

    def leave(self) -> None:
        """Go without a word, after the turn in flight: the others find the connections closed."""
        with self._turn:
            self._ranks.close()

    async def keep_in_touch(self) -> None:
        """Until cancelled, let idle ranks know that this one is there; LostRankError when one of them is not."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            await asyncio.to_thread(self._beat)

    def _beat(self) -> None:
        if self._turn.acquire(blocking=False):  # in the middle of a turn nobody waits for a sign of life
            try:
                self._ranks.share_inbox(b"")
            finally:
                self._turn.release()

    def _take_turn(self, act: Callable[[], T], *action: Any) -> T:
        with self._turn:
            news, self._news = self._news, []
            self._ranks.share_inbox(msgpack.packb((news, action)))
            return act()


async def lead(loop: EngineLoop, engine: LockStepEngine) -> None:
    """Run the loop of this engine as long as the other ranks are there, and let them go at its end.

    Raises:
        EngineError: The loop failed, or, as LostRankError, ranks are gone or late while there is nothing to do; either
            way the loop has it as its failure, and the others were not let go.
    """
    work, touch = asyncio.create_task(loop.run()), asyncio.create_task(engine.keep_in_touch())
    try:
        await asyncio.wait({work, touch}, return_when=asyncio.FIRST_COMPLETED)
        if touch.done():
            loop.failure = touch.exception()
    finally:
        for task in (touch, work):
            task.cancel()
        ends = await asyncio.gather(touch, work, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    await asyncio.to_thread(engine.release_followers)


def refuse_request_timeout(config: InferenceConfig) -> None:
    """Raise ConfigurationError where a replica of several ranks is to watch over deadlines."""
    if config.request_timeout is not None:
        raise ConfigurationError(
            f"request_timeout={config.request_timeout}: the ranks of a replica have no clock in common; leave it out, "
            "and give it to the coordinator",
            field="request_timeout",
        )


def follow(
    engine: RankEngine,
    ranks: Ranks,
    on_turn: OnTurn | None = None,
    own_weights: Callable[[], Weights] | None = None,
) -> None:
    """Do what the first rank does, until it says that this is the end.

    Args:
        engine: This rank's own.
        ranks: The replica.
        on_turn: Called after every turn, with what the first rank asked for and why no rank did it, if that is so.
        own_weights: Waits for the tensors of new weights that this rank is given, where the first rank takes some.

    Raises:
        LostRankError: Ranks are gone or late; they are named.
        LockStepError: This rank no longer does the same.
    """
    while True:
        inbox = ranks.share_inbox(None)
        if not inbox:
            continue
        news, (action, *args) = msgpack.unpackb(inbox)
        for item in news:
            _take(engine, *item)
        if action == Turn.LEAVE:
            return
        if action == Turn.UPDATE_WEIGHTS and args[0] is None:
            assert own_weights is not None, "the first rank takes tensors that this one is not given"
            args[0] = own_weights()
        refusal = _act(engine, ranks, action, args)
        engine.take_reports()  # the first rank has them too
        if on_turn is not None:
            on_turn(action, args, refusal)


def _take(engine: RankEngine, kind: str, request_id: int, *args: Any) -> None:
    if kind == _News.ABORT:
        engine.abort_request(request_id)
        return
    prompt, params, generated = args
    # What is wrong with a request is said by the first rank, which has met the same.
    with contextlib.suppress(Exception):
        engine.add_request(request_id, prompt, SamplingParams.deserialize(params), generated=generated)


def _act(engine: RankEngine, ranks: Ranks, action: str, args: list[Any]) -> CheckpointError | None:
    match action:
        case Turn.STEP:
            engine.step_modern()
        case Turn.SUSPEND:
            _suspend(engine, ranks)
        case Turn.RESUME:
            _resume(engine, ranks)
        case Turn.BARRIER:
            _barrier(engine, ranks, args[0])
        case Turn.UPDATE_WEIGHTS:
            try:
                engine.update_weights(args[0], version=args[1])
            except CheckpointError as error:
                return error  # no rank has taken them
        case _:
            raise AssertionError(f"the first rank asks for {action}")
    return None


def _barrier(engine: RankEngine, ranks: Ranks, occasion: str) -> None:
    engine.barrier(occasion)
    ranks.barrier(occasion)


def _suspend(engine: RankEngine, ranks: Ranks) -> None:
    engine.suspend()
    ranks.barrier("suspend")


def _resume(engine: RankEngine, ranks: Ranks) -> None:
    engine.resume()
    ranks.barrier("resume")
