"""A defect of the coordinator costs the item that it concerns, not the service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from messaging_support.fake_engine import FakeEngine, expected_tokens
from messaging_support.fleet import Fleet, until

from megatron_runtime.data_parallel_inference_coordinator.core import Core
from megatron_runtime.headers import Headers
from megatron_runtime.sampling_params import SamplingParams

PARAMS = SamplingParams(num_tokens_to_generate=20, seed=5)
UNENCODABLE = 2**70


def adds_an_item(core: Core) -> None:
    for client in core.clients:
        core.outbox.add(client, Headers.REQUEST_FAILED, UNENCODABLE)


def defers_an_item(core: Core) -> None:
    for engine in core.engines:
        core.outbox.defer(engine.identity, Headers.REPLY_ACK, UNENCODABLE)


def spoils_a_subscriber(core: Core) -> None:
    spoiled, other = core.clients.values()
    spoiled.subscribed = other.subscribed = True
    spoiled.sent_revision = None  # type: ignore[assignment]
    core.lifecycle.touch()


@pytest.mark.parametrize("defect", [adds_an_item, defers_an_item, spoils_a_subscriber])
async def test_the_service_continues(fleet: Fleet, defect: Callable[[Core], None]) -> None:
    fleet.add_engine(FakeEngine(step_seconds=0.001))
    first, second = await fleet.connect(), await fleet.connect()
    state = await fleet.ready(second, 1)
    coordinator: Any = fleet.coordinator
    begun: list[int] = []

    def begin() -> None:
        coordinator.on_tick = lambda: None
        defect(coordinator._core)
        begun.append(coordinator._core.lifecycle.revision)

    coordinator.on_tick = begin
    await until(lambda: begun, "the defect")
    await until(lambda: coordinator._core.protocol_errors.total(), "the count of the defect")
    for client in (first, second):
        result = await client.add_request("hello", PARAMS)
        assert list(result.generated_tokens) == expected_tokens("hello", PARAMS)
    newer = await second.wait_for_state_change(state.revision, 5.0) if begun[0] > state.revision else state
    assert newer.revision >= begun[0]
    assert fleet._thread is not None
    assert fleet._thread.is_alive()
