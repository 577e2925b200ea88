"""A request with a name-based UUID is kept while its client is lost, and is answered when it is submitted again."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
from messaging_support.fake_engine import FakeEngine, expected_tokens
from messaging_support.fleet import Fleet, until

from megatron_runtime.data_parallel_inference_coordinator import dispatcher
from megatron_runtime.data_parallel_inference_coordinator.requests import RequestEntry
from megatron_runtime.errors import CoordinatorError
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.sampling_params import SamplingParams

NAME = uuid.uuid5(uuid.NAMESPACE_OID, "a request").bytes
PARAMS = SamplingParams(num_tokens_to_generate=60, seed=5)
ENDLESS = SamplingParams(num_tokens_to_generate=100_000, seed=5)


def entry(fleet: Fleet) -> RequestEntry | None:
    """The coordinator's record of the request."""
    assert fleet.coordinator is not None
    return fleet.coordinator._core.dispatcher.requests.get(NAME)


async def vanish(fleet: Fleet, client: InferenceClient) -> None:
    """Close the connection without a message, as a killed process does."""
    client._dealer.close()
    await until(lambda: (found := entry(fleet)) is not None and not found.client, "the loss")


async def test_a_stream_of_a_lost_client_starts_again_for_the_next_client(fleet: Fleet) -> None:
    engine = FakeEngine(step_seconds=0.03)
    fleet.add_engine(engine)
    first, second = await fleet.connect(), await fleet.connect()
    lost = first.stream_request("hello", PARAMS, request_uuid=NAME)
    await anext(lost)
    await vanish(fleet, first)
    updates = second.stream_request("hello", PARAMS, request_uuid=NAME)
    assert [token async for update in updates for token in update.new_tokens] == expected_tokens("hello", PARAMS)
    assert len(engine.added) == 1


async def test_a_result_is_kept_while_its_client_is_lost(fleet: Fleet) -> None:
    engine = FakeEngine(step_seconds=0.03)
    loop = fleet.add_engine(engine)
    first, second = await fleet.connect(), await fleet.connect()
    first.add_request("hello", PARAMS, request_uuid=NAME)
    await until(engine.has_unfinished_requests, "the start")
    await vanish(fleet, first)
    await until(lambda: (found := entry(fleet)) is not None and found.reply is not None, "the result")
    await until(lambda: len(loop._requests) == 0, "the acknowledgement")
    result = await second.add_request("hello", PARAMS, request_uuid=NAME)
    assert result.generated_tokens == expected_tokens("hello", PARAMS)
    assert len(engine.added) == 1
    assert entry(fleet) is None


@pytest.mark.parametrize("params", [PARAMS, ENDLESS])
async def test_a_request_is_dropped_when_no_client_submits_it_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    monkeypatch.setattr(dispatcher, "LINGER_SECONDS", 0.5)
    engine = FakeEngine(step_seconds=0.005)
    loop = fleet.add_engine(engine)
    client = await fleet.connect()
    client.add_request("hello", params, request_uuid=NAME)
    await until(engine.has_unfinished_requests, "the start")
    client._dealer.close()
    await until(lambda: entry(fleet) is None, "the end")
    await until(lambda: len(loop._requests) == 0 and not engine.has_unfinished_requests(), "the release")
    assert (await (await fleet.connect()).service_state()).outstanding_requests == 0


async def test_a_request_without_a_client_continues_on_another_engine(fleet: Fleet) -> None:
    doomed = fleet.spawn_engine(group=0, step_seconds=0.02)
    first, second = await fleet.connect(), await fleet.connect()
    await fleet.ready(first, 1)
    lost = first.stream_request("hello", PARAMS, request_uuid=NAME)
    await anext(lost)
    await vanish(fleet, first)
    doomed.kill()
    engine = FakeEngine()
    fleet.add_engine(engine, group=1)
    await until(lambda: engine.added, "the hand-out")
    result = await second.add_request("hello", PARAMS, request_uuid=NAME)
    assert result.generated_tokens == expected_tokens("hello", PARAMS)
    assert engine.added[0] > 0


async def test_a_client_that_disconnects_leaves_no_requests(fleet: Fleet) -> None:
    engine = FakeEngine(step_seconds=0.005)
    fleet.add_engine(engine)
    client = await fleet.connect()
    client.add_request("hello", ENDLESS, request_uuid=NAME)
    await until(engine.has_unfinished_requests, "the start")
    client.stop()
    await until(lambda: entry(fleet) is None and not engine.has_unfinished_requests(), "the abort")
    assert (await (await fleet.connect()).service_state()).outstanding_requests == 0


async def test_a_client_gets_an_error_when_another_one_submits_its_request(fleet: Fleet) -> None:
    engine = FakeEngine(step_seconds=0.005)
    fleet.add_engine(engine)
    first, second = await fleet.connect(), await fleet.connect()
    lost = first.add_request("hello", PARAMS, request_uuid=NAME)
    await until(engine.has_unfinished_requests, "the start")
    result = await second.add_request("hello", PARAMS, request_uuid=NAME)
    with pytest.raises(CoordinatorError, match="another client has submitted the same request"):
        await lost
    assert result.generated_tokens == expected_tokens("hello", PARAMS)


@pytest.mark.parametrize(
    ("ends", "elsewhere"),
    [("cancel", False), ("cancel", True), ("abort", True)],
    ids=["cancelled, same client", "cancelled, other client", "aborted, other client"],
)
async def test_a_request_that_is_submitted_again_right_after_it_ended_is_answered(
    fleet: Fleet, ends: str, elsewhere: bool
) -> None:
    fleet.add_engine(FakeEngine(step_seconds=0.02))
    first, second = await fleet.connect(), await fleet.connect()
    await fleet.ready(first, 1)
    begun = asyncio.Event()
    lost = first.add_request("hello", PARAMS, request_uuid=NAME, on_update=lambda _: begun.set())
    await begun.wait()
    if ends == "cancel":
        lost.cancel()
    else:
        first.abort_request(lost.request_id)
    await asyncio.sleep(0)
    retry = (second if elsewhere else first).stream_request("hello", PARAMS, request_uuid=NAME)
    updates = [update async for update in retry]
    assert [token for update in updates for token in update.new_tokens] == expected_tokens("hello", PARAMS)
    finished = updates[-1].finished
    assert finished is not None
    assert finished.finish_reason == "length"
    (outcome,) = await asyncio.gather(lost, return_exceptions=True)
    assert isinstance(outcome, asyncio.CancelledError | CoordinatorError)
    assert entry(fleet) is None


async def test_acknowledgements_of_earlier_runs_do_not_end_the_run_of_a_request_that_is_submitted_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator sends acknowledgements from time to time; here, just after it has assigned a request."""
    submit = dispatcher.Dispatcher.submit

    def submit_and_acknowledge(self: dispatcher.Dispatcher, *args: Any) -> None:
        submit(self, *args)
        self._outbox.release()

    monkeypatch.setattr(dispatcher.Dispatcher, "submit", submit_and_acknowledge)
    fleet.add_engine(FakeEngine(step_seconds=0.005))
    client = await fleet.connect()
    await fleet.ready(client, 1)
    for _ in range(5):
        result = await asyncio.wait_for(client.add_request("hello", PARAMS, request_uuid=NAME), 10)
        assert result.generated_tokens == expected_tokens("hello", PARAMS)
