"""The control API of the launcher, used by the operator's client."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import uvicorn

from megatron_operator.control_client import MAX_ANSWER_BYTES, MAX_ENTRIES, ControlApiUnreachable, ControlClient
from megatron_operator.observed_state import EngineState, Signal, SignalRefused
from megatron_runtime.errors import InvalidStateError
from megatron_runtime.headers import Headers
from megatron_runtime.launch.control_api import create_control_api
from megatron_runtime.launch.pod_state import PodFacts, PodState, RankPhase, RankState, RegisteredReplicaGroup

HOST = "127.0.0.1"
TOKEN = "control-token-of-the-test"


class Sender:
    """A simulated coordinator: accepts pause, refuses other signals."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def send(self, signal: Headers, *, timeout: float, wait: bool) -> None:
        """The runtime's ``SignalSender``."""
        del timeout, wait
        if signal is not Headers.PAUSE:
            raise InvalidStateError(f"{signal.name}: the engine is RUNNING", state="RUNNING", allowed=("pause",))
        self.sent.append(signal.name.lower())


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0)) as made:
        yield made


@asynccontextmanager
async def control_api(bound: socket.socket, state: PodState, sender: Sender) -> AsyncIterator[int]:
    """The runtime's control API, on a port of this machine."""
    api = create_control_api(state, lambda: sender, token=TOKEN, metrics=lambda: b"")
    server = uvicorn.Server(uvicorn.Config(api, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


def facts() -> PodFacts:
    """A leader with a running engine."""
    return PodFacts(
        is_leader=True,
        engine_state="RUNNING",
        replica_groups=(RegisteredReplicaGroup(index=0, state="RUNNING", running_requests=1, waiting_requests=2),),
        ranks={0: RankState(0, RankPhase.LOADING, 1, 4)},
        frontends_listening=1,
        restarts=2,
        error={"reason": "RankFailed", "message": "rank 0 ended", "rank": 0, "exitCode": 1},
    )


async def test_the_largest_state_is_half_of_what_the_operator_reads(bound: socket.socket) -> None:
    group = RegisteredReplicaGroup(state="SUSPENDING", running_requests=65536, waiting_requests=10**6, index=0)
    groups = tuple(replace(group, index=index, weight_version=10**9) for index in range(MAX_ENTRIES))
    rank = RankState(0, RankPhase.REGISTERING, 10**13, 10**13, "x" * 100)
    ranks = {number: replace(rank, rank=number) for number in range(64)}
    state = PodState(replace(facts(), replica_groups=groups, ranks=ranks))
    async with control_api(bound, state, Sender()) as port, ControlClient(TOKEN, port=port) as client:
        report = await client.state(HOST)
    assert (len(report.replicas), len(report.ranks)) == (1024, 64)
    assert report.size < 0.55 * MAX_ANSWER_BYTES


async def test_the_operator_parses_the_state_of_the_launcher(bound: socket.socket) -> None:
    async with control_api(bound, PodState(facts()), Sender()) as port, ControlClient(TOKEN, port=port) as client:
        report = await client.state(HOST)
    assert report.ready
    assert report.engine_state is EngineState.RUNNING
    assert [(replica.group, replica.state) for replica in report.replicas] == [(0, EngineState.RUNNING)]
    assert (report.running_requests, report.waiting_requests, report.restarts) == (1, 2, 2)
    assert report.rank_phase == "Loading"
    assert report.error == "rank 0 ended"


async def test_a_change_of_state_ends_the_operators_wait(bound: socket.socket) -> None:
    state = PodState(facts())
    async with control_api(bound, state, Sender()) as port, ControlClient(TOKEN, port=port) as client:
        before = await client.state(HOST)
        waiting = asyncio.create_task(client.state(HOST, after=before.revision, wait=60))
        state.update(engine_state="PAUSING")
        assert (await waiting).engine_state is EngineState.PAUSING


async def test_a_signal_reaches_the_engine_and_a_refused_one_is_reported(bound: socket.socket) -> None:
    sender = Sender()
    async with control_api(bound, PodState(facts()), sender) as port, ControlClient(TOKEN, port=port) as client:
        await client.signal(HOST, Signal.PAUSE)
        with pytest.raises(SignalRefused) as caught:
            await client.signal(HOST, Signal.RESUME)
    assert sender.sent == ["pause"]
    assert caught.value.allowed == ("pause",)


async def test_the_control_api_accepts_only_the_operators_token(bound: socket.socket) -> None:
    async with control_api(bound, PodState(facts()), Sender()) as port, ControlClient("wrong", port=port) as client:
        with pytest.raises(ControlApiUnreachable, match="401"):
            await client.state(HOST)
