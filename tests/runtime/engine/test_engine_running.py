"""An engine that runs as a task of an event loop, and its reset."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.worker.attach import attach_engine
from megatron_runtime.errors import EngineError, InvalidStateError
from megatron_runtime.headers import EngineState
from megatron_runtime.inference_request import Status
from megatron_runtime.sampling_params import SamplingParams

MakeEngine = Callable[..., DynamicInferenceEngine]
PROMPT = [72, 101, 108, 108, 111]
GREEDY = SamplingParams(temperature=0, num_tokens_to_generate=6)


@asynccontextmanager
async def running(engine: DynamicInferenceEngine) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(engine.run_engine())
    try:
        async with asyncio.timeout(30):
            yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, MemoryError):
            await task


async def test_a_running_engine_serves_added_requests_and_waits_without_work(make_engine: MakeEngine) -> None:
    expected = make_engine().generate([PROMPT], GREEDY)[0].merge().generated_tokens
    engine = make_engine()
    async with running(engine):
        futures = [engine.add_request(i, PROMPT, GREEDY) for i in range(3)]
        for future in futures:
            assert isinstance(future, asyncio.Future)
            assert (await future).merge().generated_tokens == expected
        await asyncio.sleep(0)
        assert not engine.has_unfinished_requests()
        later = engine.add_request(9, PROMPT, GREEDY)
        assert isinstance(later, asyncio.Future)
        assert (await later).merge().generated_tokens == expected


async def test_a_running_engine_waits_while_it_is_suspended(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_cache_management_mode="recompute")
    async with running(engine):
        suspended = asyncio.create_task(engine.wait_until(EngineState.SUSPENDED))
        await asyncio.sleep(0)
        engine.suspend()
        await suspended
        assert engine.state is EngineState.SUSPENDED
        future = engine.add_request(0, PROMPT, GREEDY)
        assert isinstance(future, asyncio.Future)
        for _ in range(5):
            await asyncio.sleep(0)
        assert engine.get_request(0).status is Status.WAITING_IN_QUEUE
        engine.resume()
        await engine.wait_until(EngineState.RUNNING)
        assert (await future)[-1].succeeded()


async def test_a_failed_step_ends_the_loop_and_resolves_all_futures(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()

    def fail(*_: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(engine.controller, "run", fail)
    async with running(engine) as task:
        future = engine.add_request(0, PROMPT, GREEDY)
        assert isinstance(future, asyncio.Future)
        request = (await future)[-1]
        assert isinstance(request.error, EngineError)
        assert "none left" in str(request.error)
        with pytest.raises(MemoryError):
            await task


async def test_waiting_for_a_coordinator_state_fails_without_a_coordinator(make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidStateError, match="never PAUSED, only RUNNING or SUSPENDED"):
        await make_engine().wait_until(EngineState.PAUSED)


def test_a_reset_engine_is_like_a_new_one(make_engine: MakeEngine) -> None:
    fresh = make_engine(enable_prefix_caching=True, max_requests=2)
    expected, stats = fresh.generate([PROMPT], GREEDY)[0].merge(), fresh.stats()
    engine = make_engine(enable_prefix_caching=True, max_requests=2)
    engine.generate([PROMPT], GREEDY)
    futures = [engine.add_request(i, PROMPT, GREEDY) for i in range(10, 14)]
    engine.step_modern()
    engine.reset()
    assert [future.result(timeout=0)[-1].finish_reason for future in futures] == ["abort"] * 4
    assert not engine.has_unfinished_requests()
    assert engine.pop_reports() == ([], {})
    engine.check_integrity()
    again = engine.generate([PROMPT], GREEDY)[0].merge()
    assert (again.request_id, again.generated_tokens) == (expected.request_id, expected.generated_tokens)
    assert (again.num_cached_tokens, engine.stats()) == (0, stats)


async def test_an_attached_engine_can_be_neither_reset_nor_run(make_engine: MakeEngine) -> None:
    engine = make_engine()
    attached = await attach_engine(engine)
    assert attached.coordinator is not None
    try:
        async with asyncio.timeout(60):
            await engine.wait_until(EngineState.RUNNING)
            with pytest.raises(InvalidStateError, match="without a coordinator"):
                engine.reset()
            with pytest.raises(InvalidStateError, match="runs this engine already"):
                await engine.run_engine()
            await attached.loop.drain(5)
            await attached.task
    finally:
        await attached.coordinator.stop(5)
    assert engine.state is EngineState.STOPPED
    engine.reset()
