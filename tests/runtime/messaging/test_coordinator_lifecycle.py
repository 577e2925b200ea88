"""Control signals are acknowledged by every engine, refused in the wrong state, and always answered."""

from __future__ import annotations

import asyncio

import pytest
from messaging_support.fake_engine import FakeEngine, StuckEngine, expected_tokens
from messaging_support.fleet import Fleet, until

from megatron_runtime.errors import InvalidStateError, TransitionTimeoutError
from megatron_runtime.headers import EngineState
from megatron_runtime.sampling_params import SamplingParams

PARAMS = SamplingParams(num_tokens_to_generate=20, seed=5)


async def test_every_engine_acknowledges_every_state(fleet: Fleet) -> None:
    loops = [fleet.add_engine(group=group) for group in range(2)]
    client = await fleet.connect()
    await fleet.ready(client, 2)
    await client.pause_engines()
    assert [loop.state for loop in loops] == [EngineState.PAUSED] * 2
    await client.suspend_engines()
    assert [loop.state for loop in loops] == [EngineState.SUSPENDED] * 2
    assert (await client.service_state()).state == "SUSPENDED"
    await client.resume_engines()
    await client.unpause_engines()
    assert [loop.state for loop in loops] == [EngineState.RUNNING] * 2
    assert (await client.service_state()).state == "RUNNING"


async def test_a_request_sent_while_paused_waits_and_completes_after_unpause(fleet: Fleet) -> None:
    engine = FakeEngine()
    fleet.add_engine(engine)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    await client.pause_engines()
    future = client.add_request("waiting", PARAMS)
    await until(lambda: engine.added, "the hand-out")
    steps = engine.steps
    await client.suspend_engines()
    await client.resume_engines()
    assert engine.steps == steps
    assert not future.done()
    await client.unpause_engines()
    assert (await future).generated_tokens == expected_tokens("waiting", PARAMS)


async def test_requests_in_flight_stop_during_a_pause_and_continue_with_the_same_tokens(fleet: Fleet) -> None:
    fleet.add_engine(FakeEngine(step_seconds=0.005))
    client = await fleet.connect()
    stream = client.stream_request("frozen", PARAMS)
    await anext(stream)
    await client.pause_engines()
    await client.unpause_engines()
    tokens = [token async for update in stream for token in update.new_tokens]
    assert tokens == expected_tokens("frozen", PARAMS)[1:]


@pytest.mark.parametrize("signal", ["unpause", "suspend", "resume", "stop"])
async def test_a_signal_in_the_wrong_state_raises_and_names_the_allowed_signals(fleet: Fleet, signal: str) -> None:
    fleet.add_engine()
    client = await fleet.connect(strict_signals=True)
    with pytest.raises(InvalidStateError, match=f"{signal} is not possible while the service is RUNNING") as caught:
        await getattr(client, f"{signal}_engines")()
    assert caught.value.state == "RUNNING"
    assert caught.value.allowed == ("pause",)


async def test_a_pause_in_a_pause_is_done_at_once(fleet: Fleet) -> None:
    fleet.add_engine()
    client = await fleet.connect()
    await client.pause_engines()
    await client.pause_engines()
    await client.suspend_engines()
    await client.pause_engines()
    assert (await client.service_state()).state == "SUSPENDED"


async def test_a_transition_that_takes_too_long_names_the_engines_that_are_missing(fleet: Fleet) -> None:
    stuck = StuckEngine()
    fleet.add_engine(group=0)
    fleet.add_engine(stuck, group=1)
    client = await fleet.connect()
    await fleet.ready(client, 2)
    futures = [client.add_request("a", PARAMS), client.add_request("b", PARAMS)]
    await until(lambda: stuck.added, "the hand-out")
    with pytest.raises(TransitionTimeoutError, match=r"missing: replica group 1 \(attempt 0\)$"):
        await client.pause_engines(timeout=0.5)
    with pytest.raises(
        InvalidStateError, match="while the service is PAUSING; possible: pause, unpause, suspend, stop"
    ):
        await client.resume_engines()
    stuck.let_go.set()
    await client.pause_engines()
    await client.unpause_engines()
    assert [result.generated_tokens for result in await asyncio.gather(*futures)] == [
        expected_tokens("a", PARAMS),
        expected_tokens("b", PARAMS),
    ]


@pytest.mark.parametrize(
    ("before", "signal"),
    [
        ([], "pause"),
        (["pause"], "unpause"),
        (["pause"], "suspend"),
        (["pause", "suspend"], "resume"),
        (["pause"], "stop"),
        (["pause", "suspend"], "stop"),
    ],
)
async def test_every_signal_ends_at_its_timeout_and_names_the_missing_engines(
    fleet: Fleet, before: list[str], signal: str
) -> None:
    loops = [fleet.add_engine(group=group) for group in range(3)]
    client = await fleet.connect()
    await fleet.ready(client, 3)
    for step in before:
        await getattr(client, f"{step}_engines")()
    for deaf in loops[1:]:
        deaf._connection._on_message = lambda _: None
    missing = r"missing: replica group 1 \(attempt 0\), replica group 2 \(attempt 0\)$"
    with pytest.raises(TransitionTimeoutError, match=rf"^{signal} was not done within 0.3 s; .*{missing}"):
        await getattr(client, f"{signal}_engines")(timeout=0.3)


@pytest.mark.parametrize(
    ("before", "refused", "possible"),
    [
        (["pause"], ["resume"], "PAUSED; possible: unpause, suspend, stop"),
        (["pause", "suspend"], ["unpause", "suspend"], "SUSPENDED; possible: resume, stop"),
        (["pause", "suspend", "resume"], ["resume"], "PAUSED; possible: unpause, suspend, stop"),
    ],
)
async def test_every_state_refuses_signals_without_an_edge(
    fleet: Fleet, before: list[str], refused: list[str], possible: str
) -> None:
    fleet.add_engine()
    client = await fleet.connect()
    for step in before:
        await getattr(client, f"{step}_engines")()
    for signal in refused:
        with pytest.raises(InvalidStateError, match=f"while the service is {possible}$"):
            await getattr(client, f"{signal}_engines")()


async def test_a_lost_engine_does_not_block_a_transition(fleet: Fleet) -> None:
    stuck = StuckEngine()
    fleet.add_engine(group=0)
    leaving = fleet.add_engine(stuck, group=1)
    client = await fleet.connect()
    await fleet.ready(client, 2)
    futures = [client.add_request("a", PARAMS), client.add_request("b", PARAMS)]
    await until(lambda: stuck.added, "the hand-out")
    pausing = client.pause_engines()
    await until(lambda: fleet.loops[0].state is EngineState.PAUSED, "the pause of the other")
    leaving._connection.close()  # without a message, as a killed process
    await pausing
    stuck.let_go.set()
    await client.unpause_engines()
    assert [result.succeeded() for result in await asyncio.gather(*futures)] == [True, True]


async def test_stop_answers_unfinished_requests_and_ends_the_engines(fleet: Fleet) -> None:
    loop = fleet.add_engine(FakeEngine(step_seconds=0.005))
    client = await fleet.connect()
    future = client.add_request("unfinished", SamplingParams(num_tokens_to_generate=100_000))
    await until(lambda: loop._engine.has_unfinished_requests(), "the start")
    await client.pause_engines()
    await client.stop_engines()
    result = await future
    assert result.failed()
    assert result.finish_reason == "abort"
    await until(lambda: loop.ended, "the end of the loop")
    assert loop.failure is None
    state = await client.service_state()
    assert (state.state, state.engines) == ("RUNNING", ())


async def test_an_engine_that_registers_late_reaches_the_target_state_before_it_gets_requests(fleet: Fleet) -> None:
    fleet.add_engine(group=0)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    await client.pause_engines()
    await client.suspend_engines()
    late = fleet.add_engine(group=1)
    await fleet.ready(client, 2)
    assert late.state is EngineState.SUSPENDED


async def test_a_coordinator_that_starts_paused_pauses_its_engines_first() -> None:
    async with Fleet(initial_state="PAUSED") as fleet:
        fleet.start_coordinator()
        engine = FakeEngine()
        loop = fleet.add_engine(engine)
        client = await fleet.connect()
        future = client.add_request("hello", PARAMS)
        await fleet.ready(client, 1)
        await until(lambda: engine.added, "the hand-out")
        assert loop.state is EngineState.PAUSED
        assert engine.steps == 0
        await client.unpause_engines()
        assert (await future).succeeded()


async def test_a_change_of_state_ends_the_wait_for_it(fleet: Fleet) -> None:
    client, watcher = await fleet.connect(), await fleet.connect()
    before = await watcher.service_state()
    waiting = asyncio.create_task(watcher.wait_for_state_change(before.revision, 20))
    fleet.add_engine(group=3, attempt=2)
    after = await waiting
    assert after.revision > before.revision
    assert [(view.replica_group, view.attempt) for view in after.engines] == [(3, 2)]
    await fleet.ready(client, 1)
    await client.pause_engines()
    state = after
    while state.state != "PAUSED":
        state = await watcher.wait_for_state_change(state.revision, 20)


async def test_waiting_for_a_change_returns_the_current_state_at_the_timeout(fleet: Fleet) -> None:
    client = await fleet.connect()
    state = await client.service_state()
    assert (await client.wait_for_state_change(state.revision, 0.1)).revision == state.revision


async def test_a_draining_engine_finishes_its_requests_and_gets_no_new_ones(fleet: Fleet) -> None:
    busy, idle = FakeEngine(step_seconds=0.005), FakeEngine()
    leaving = fleet.add_engine(busy, group=0)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    first = client.add_request("first", PARAMS)
    await until(lambda: busy.added, "the hand-out")
    fleet.add_engine(idle, group=1)
    await fleet.ready(client, 2)
    draining = asyncio.create_task(leaving.drain(20))
    others = [client.add_request(f"later {number}", PARAMS) for number in range(4)]
    assert await draining
    assert (await first).generated_tokens == expected_tokens("first", PARAMS)
    assert all(result.succeeded() for result in await asyncio.gather(*others))
    assert leaving.ended
    assert leaving.failure is None


async def test_a_drain_does_not_wait_for_the_clients_of_an_earlier_coordinator(fleet: Fleet) -> None:
    leaving = fleet.add_engine(FakeEngine())
    client = await fleet.connect()
    await client.add_request("answered, but not acknowledged", PARAMS)
    fleet.stop_coordinator()
    fleet.start_coordinator()
    await fleet.ready(client, 1)
    assert await leaving.drain(20)


async def test_a_drain_between_a_registration_and_its_answer_is_reported(fleet: Fleet) -> None:
    stuck = StuckEngine()
    leaving = fleet.add_engine(stuck)
    client = await fleet.connect()
    await fleet.ready(client, 1)
    answer = client.add_request("unfinished", PARAMS)
    await until(stuck.has_unfinished_requests, "the start")
    leaving._connection._register()
    drained = asyncio.create_task(leaving.drain(20))
    state = await client.service_state()
    while not state.engines[0].draining:
        known = state.revision
        state = await client.wait_for_state_change(known, 20)
        assert state.revision > known
    stuck.let_go.set()
    assert await drained
    assert (await answer).generated_tokens == expected_tokens("unfinished", PARAMS)


async def test_requests_unfinished_at_the_drain_timeout_continue_on_another_engine(fleet: Fleet) -> None:
    wanted = SamplingParams(num_tokens_to_generate=300, seed=1)
    leaving = fleet.add_engine(FakeEngine(step_seconds=0.01), group=0)
    client = await fleet.connect()
    future = client.add_request("long", wanted)
    await until(lambda: leaving._engine.has_unfinished_requests(), "the start")
    fleet.add_engine(FakeEngine(), group=1)
    await fleet.ready(client, 2)
    assert not await leaving.drain(0.3)
    assert (await future).generated_tokens == expected_tokens("long", wanted)
