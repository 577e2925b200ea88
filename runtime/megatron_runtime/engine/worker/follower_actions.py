"""The actions of the first rank of a replica group, executed by its other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgpack

from megatron_runtime.engine.worker.lock_step import (
    Action,
    Change,
    barrier_together,
    resume_together,
    suspend_together,
)
from megatron_runtime.engine.worker.protocol import RankEngine
from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.refit import Weights
from megatron_runtime.parallel.ranks import Ranks
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire.items import AdapterEntry

OnAction = Callable[[str, list[Any], CheckpointError | None], None]


def run_follower(
    engine: RankEngine,
    ranks: Ranks,
    on_action: OnAction | None = None,
    own_weights: Callable[[], Weights] | None = None,
) -> None:
    """Execute the actions of the first rank until it releases this one.

    Args:
        engine: The engine of this rank.
        ranks: The replica group.
        on_action: Called after every action, with its arguments, and the error if no rank has executed it.
        own_weights: Waits for the tensors of new weights that this rank gets, if the first rank accepts tensors.

    Raises:
        LostRankError: Ranks are lost or late; the error names them.
        LockStepError: This rank has computed another schedule than the first one.
    """
    while True:
        inbox = ranks.share_inbox(None)
        if not inbox:
            continue
        changes, (action, *args) = msgpack.unpackb(inbox)
        for change in changes:
            _apply(engine, *change)
        if action == Action.LEAVE:
            return
        if action == Action.UPDATE_WEIGHTS and args[0] is None:
            assert own_weights is not None, "the first rank accepts tensors that this one does not get"
            args[0] = own_weights()
        refusal = _execute(engine, ranks, action, args)
        engine.pop_reports()  # the first rank reports them
        if on_action is not None:
            on_action(action, args, refusal)


def _apply(engine: RankEngine, kind: str, subject: Any, *args: Any) -> None:
    if kind == Change.GRAMMAR:
        engine.compile_grammar(subject)
        return
    if kind == Change.END_OF_GRAMMAR:
        engine.release_grammar(subject)
        return
    if kind == Change.EPOCH:
        engine.set_generation_epoch(subject)
        return
    if kind == Change.STALENESS:
        engine.increment_staleness()
        return
    if kind == Change.PREFIXES:
        engine.invalidate_prefix_cache()
        return
    if kind == Change.ABORT:
        engine.abort_request(subject)
        return
    prompt, params, generated = args
    # The first rank reports the errors of a request, which are the same there.
    with contextlib.suppress(Exception):
        engine.add_request(subject, prompt, SamplingParams.deserialize(params), generated=generated)


def _execute(engine: RankEngine, ranks: Ranks, action: str, args: list[Any]) -> CheckpointError | None:
    match action:
        case Action.STEP:
            engine.step_modern()
        case Action.SUSPEND:
            suspend_together(engine, ranks)
        case Action.RESUME:
            resume_together(engine, ranks)
        case Action.BARRIER:
            barrier_together(engine, ranks, args[0])
        case Action.START_PROFILER:
            engine.start_profiler()
        case Action.STOP_PROFILER:
            with contextlib.suppress(OSError):  # every rank of a machine reports the same
                engine.stop_profiler()
        case Action.UPDATE_WEIGHTS:
            try:
                engine.update_weights(args[0], version=args[1])
            except CheckpointError as error:
                return error  # no rank has loaded them
        case Action.ASSIGN_ADAPTERS:
            try:
                engine.assign_adapters([AdapterEntry(*entry) for entry in args[0]])
            except CheckpointError as error:
                return error  # no rank has changed its adapters
        case _:
            raise AssertionError(f"unknown action {action}")
    return None
