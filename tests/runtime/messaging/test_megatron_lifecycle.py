"""The lifecycle as Megatron's own scripts drive it: signals that are not awaited, and waits for the engine's states."""

from __future__ import annotations

import asyncio
import logging

import pytest
from messaging_support.fake_engine import FakeEngine, expected_tokens
from messaging_support.fleet import Fleet, until
from suite_support.repetition import repeated, rng_of_run

from megatron_runtime.engine.worker.engine_loop import EngineLoop
from megatron_runtime.errors import EngineError, InvalidStateError
from megatron_runtime.headers import EngineState
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.sampling_params import SamplingParams

SECONDS = 20.0
"""Limit of one wait: a signal that is lost shows as a timeout."""
CYCLES = repeated(100, 1000)
PARAMS = SamplingParams(num_tokens_to_generate=20, seed=5)


async def reach(loops: list[EngineLoop], state: EngineState) -> None:
    async with asyncio.timeout(SECONDS):
        await asyncio.gather(*(loop.wait_until(state) for loop in loops))


async def cycle(client: InferenceClient, loops: list[EngineLoop]) -> None:
    """Each signal as soon as the engines are there, which is before the coordinator knows it."""
    client.pause_engines()
    await reach(loops, EngineState.PAUSED)
    client.suspend_engines()
    await reach(loops, EngineState.SUSPENDED)
    client.resume_engines()
    await reach(loops, EngineState.RESUMED)
    client.unpause_engines()
    await reach(loops, EngineState.RUNNING)


async def test_a_wait_for_resumed_returns_in_every_cycle(fleet: Fleet) -> None:
    loop = fleet.add_engine()
    client = await fleet.connect()
    await fleet.ready(client, 1)
    for _ in range(10):
        await cycle(client, [loop])
    assert loop.state is EngineState.RUNNING


async def test_paused_stays_set_through_a_suspension_and_resumed_until_the_next_one(fleet: Fleet) -> None:
    loop = fleet.add_engine()
    client = await fleet.connect()
    await fleet.ready(client, 1)
    await client.pause_engines()
    await client.suspend_engines()
    await reach([loop], EngineState.PAUSED)
    await client.resume_engines()
    await client.unpause_engines()
    await reach([loop], EngineState.RESUMED)
    await client.pause_engines()
    await client.suspend_engines()
    for cleared in (EngineState.RESUMED, EngineState.RUNNING):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loop.wait_until(cleared), 0.05)


@pytest.mark.repetition
async def test_no_signal_of_many_cycles_is_lost_under_load(fleet: Fleet) -> None:
    rng = rng_of_run("MEGATRON_LIFECYCLE_SEED")
    loops = [fleet.add_engine(FakeEngine(step_seconds=0.001), group=group) for group in range(2)]
    client = await fleet.connect()
    await fleet.ready(client, 2)
    for turn in range(CYCLES):
        requests = [client.add_request(f"{turn}-{number}", PARAMS) for number in range(4)]
        await asyncio.sleep(rng.choice((0.0, rng.uniform(0, 0.02))))
        await cycle(client, loops)
        answers = await asyncio.wait_for(asyncio.gather(*requests), SECONDS)
        assert [answer.generated_tokens for answer in answers] == [
            expected_tokens(f"{turn}-{number}", PARAMS) for number in range(4)
        ]


async def test_signals_that_are_sent_at_once_are_carried_out_in_order(fleet: Fleet) -> None:
    loops = [fleet.add_engine(group=group) for group in range(2)]
    client = await fleet.connect()
    await fleet.ready(client, 2)
    signals = (client.pause_engines, client.suspend_engines, client.resume_engines, client.unpause_engines)
    await asyncio.gather(*[signal() for _ in range(3) for signal in signals])
    assert [loop.state for loop in loops] == [EngineState.RUNNING] * 2
    assert (await client.service_state()).state == "RUNNING"


async def test_a_running_service_is_suspended_by_one_signal_and_runs_again_after_one(fleet: Fleet) -> None:
    loop = fleet.add_engine()
    client = await fleet.connect()
    await fleet.ready(client, 1)
    await client.suspend_engines()
    assert (loop.state, (await client.service_state()).state) == (EngineState.SUSPENDED, "SUSPENDED")
    await client.resume_engines()
    assert (loop.state, (await client.service_state()).state) == (EngineState.RUNNING, "RUNNING")


async def test_a_service_that_was_paused_before_its_suspension_is_paused_after_it(fleet: Fleet) -> None:
    loop = fleet.add_engine()
    client = await fleet.connect()
    await fleet.ready(client, 1)
    await client.suspend_engines()
    await client.resume_engines()
    await client.pause_engines()
    await client.suspend_engines()
    await client.resume_engines()
    assert loop.state is EngineState.PAUSED


async def test_a_running_service_is_stopped_by_one_signal(fleet: Fleet) -> None:
    loop = fleet.add_engine()
    client = await fleet.connect()
    await fleet.ready(client, 1)
    await client.stop_engines()
    await until(lambda: loop.ended, "the end of the loop")
    await reach([loop], EngineState.STOPPED)
    with pytest.raises(EngineError, match="the engine loop has ended: it has stopped"):
        await loop.wait_until(EngineState.SUSPENDED)


async def test_a_refusal_is_a_warning_only_where_nothing_awaits_it(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.add_engine()
    client = await fleet.connect()
    await fleet.ready(client, 1)
    with caplog.at_level(logging.WARNING, "megatron_runtime.inference_client"):
        with pytest.raises(InvalidStateError):
            await client.unpause_engines()
        with pytest.raises(InvalidStateError):
            await asyncio.wait_for(client.unpause_engines(), SECONDS)
        assert caplog.messages == []
        client.unpause_engines()
        await until(lambda: caplog.messages, "the warning")
    assert caplog.messages == [
        "a control signal failed: unpause is not possible while the service is RUNNING; possible: pause"
    ]


async def test_a_signal_that_is_open_when_its_client_stops_is_no_warning(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    client = await fleet.connect()
    with caplog.at_level(logging.WARNING, "megatron_runtime.inference_client"):
        signal = client.pause_engines()
        client.stop()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert isinstance(signal, asyncio.Task)
        assert signal.done()
    assert caplog.messages == []
