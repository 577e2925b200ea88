"""The control API of a pod's state, without processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from megatron_runtime.errors import (
    CheckpointError,
    CoordinatorError,
    InvalidStateError,
    StaleEpochError,
    TransitionTimeoutError,
)
from megatron_runtime.headers import Headers
from megatron_runtime.launch.control_api import create_control_api
from megatron_runtime.launch.metrics import create_exposition
from megatron_runtime.launch.pod_state import PodFacts, PodState, RankPhase, RegisteredReplicaGroup


class Engines:
    """Stands in for EngineLink: records signals, or raises ``error``."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, bool]] = []
        self.error: Exception | None = None

    async def send(self, signal: Headers, *, timeout: float, wait: bool) -> None:  # noqa: ARG002
        """As the real method."""
        self._take(signal.name.lower(), wait)

    async def update_weights(self, path: str, *, timeout: float, wait: bool) -> None:  # noqa: ARG002
        """As the real method."""
        self._take(path, wait)

    async def profile(self, *, start: bool) -> None:
        """As the real method."""
        self._take("start profile" if start else "stop profile", True)

    def _take(self, call: str, wait: bool) -> None:
        if self.error is not None:
            raise self.error
        self.taken.append((call, wait))


@pytest.fixture
def state() -> PodState:
    """A leader that has just started."""
    return PodState(PodFacts(is_leader=True, has_frontends=True))


@pytest.fixture
def engines() -> Engines:
    """Engines that accept every signal."""
    return Engines()


@pytest.fixture
async def client(state: PodState, engines: Engines) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the API, with the right token."""
    metrics = create_exposition(lambda: state.facts, None)
    api = create_control_api(state, lambda: engines, token="t", is_local=True, metrics=metrics)
    transport = httpx.ASGITransport(app=api)
    headers = {"Authorization": "Bearer t"}
    async with httpx.AsyncClient(transport=transport, base_url="http://10.0.0.7:9000", headers=headers) as found:
        yield found


def registered(*groups: int, state: str = "RUNNING") -> dict[str, Any]:
    """The changes of the pod's state when these replica groups are registered."""
    return {
        "engine_state": state,
        "replica_groups": tuple(RegisteredReplicaGroup(group, state, 2, 3, 8, 2) for group in groups),
    }


async def test_a_leader_is_ready_with_a_frontend_and_a_replica_group(
    client: httpx.AsyncClient, state: PodState
) -> None:
    assert (await client.get("/readyz")).status_code == 503
    state.update(frontends_listening=1)
    assert (await client.get("/readyz")).status_code == 503
    state.update(**registered(0, state="SUSPENDED"))
    assert (await client.get("/readyz")).status_code == 200
    state.update(is_ending=True)
    assert (await client.get("/readyz")).status_code == 503


async def test_a_worker_is_ready_when_its_ranks_serve() -> None:
    state = PodState(PodFacts(is_leader=False))
    assert not state.facts.ready
    state.update_rank(3, phase=RankPhase.LOADING, loaded_bytes=1, total_bytes=2)
    assert not state.facts.ready
    state.update_rank(3, phase=RankPhase.SERVING)
    assert state.facts.ready
    state.update_rank(3, registered=True)
    served = {"rank": 3, "phase": "Serving", "loadedBytes": 1, "totalBytes": 2, "message": "", "registered": True}
    assert state.body()["ranks"] == [served]


async def test_a_new_leader_stays_ready_for_a_while_until_replica_groups_have_registered() -> None:
    state = PodState(PodFacts(is_leader=False))
    state.update_rank(0, phase=RankPhase.SERVING)
    state.update(is_leader=True, is_settling=True)
    assert state.facts.ready
    state.update(is_settling=False)
    assert not state.facts.ready
    state.update(**registered(0))
    assert state.facts.ready


async def test_a_pod_with_frontends_is_ready_when_one_listens() -> None:
    state = PodState(PodFacts(is_leader=False, has_frontends=True))
    state.update_rank(0, phase=RankPhase.SERVING)
    assert not state.facts.ready
    state.update(frontends_listening=1)
    assert state.facts.ready


async def test_the_state_has_the_documented_fields(client: httpx.AsyncClient, state: PodState) -> None:
    state.update(**registered(0, 1))
    assert (await client.get("/v1/state")).json() == {
        "revision": 2,
        "role": "leader",
        "epoch": 0,
        "engineState": "RUNNING",
        "autoSuspended": False,
        "replicaGroups": [
            {"index": group, "state": "RUNNING", "runningRequests": 2, "waitingRequests": 3, "weightVersion": 0}
            for group in (0, 1)
        ],
        "ranks": [],
        "requests": {"running": 4, "waiting": 6},
        "generatedTokens": 0,
        "ready": False,
        "draining": False,
        "restarts": 0,
        "error": None,
    }


async def test_a_long_poll_waits_for_the_next_revision(client: httpx.AsyncClient, state: PodState) -> None:
    poll = asyncio.create_task(client.get("/v1/state", params={"after": 1, "timeout": 60}))
    done, _ = await asyncio.wait({poll}, timeout=0.1)
    assert not done
    state.update(restarts=1)
    assert (await poll).json()["revision"] == 2


async def test_a_long_poll_ends_at_its_timeout(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/state", params={"after": 1, "timeout": 0.05})).json()["revision"] == 1


async def test_a_revision_from_before_a_restart_is_answered_at_once(client: httpx.AsyncClient) -> None:
    answer = await asyncio.wait_for(client.get("/v1/state", params={"after": 99, "timeout": 60}), 10)
    assert answer.json()["revision"] == 1


async def test_a_change_of_load_makes_no_new_revision(state: PodState) -> None:
    state.update(replica_groups=(RegisteredReplicaGroup(0, "RUNNING", running_requests=1),))
    revision = state.revision
    state.update(replica_groups=(RegisteredReplicaGroup(0, "RUNNING", running_requests=5),))
    assert state.revision == revision
    assert state.body()["requests"]["running"] == 5


async def test_signals_are_passed_on(client: httpx.AsyncClient, engines: Engines) -> None:
    assert (await client.post("/v1/pause")).status_code == 202
    assert (await client.post("/v1/unpause", params={"wait": "true"})).status_code == 200
    assert engines.taken == [("pause", False), ("unpause", True)]


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_the_profiler_is_started_and_stopped(client: httpx.AsyncClient, engines: Engines, prefix: str) -> None:
    assert (await client.post(f"{prefix}/start_profile")).json() == {"status": "ok", "action": "start_profile"}
    assert (await client.post(f"{prefix}/stop_profile")).json() == {"status": "ok", "action": "stop_profile"}
    assert engines.taken == [("start profile", True), ("stop profile", True)]
    refused = await client.post(f"{prefix}/start_profile", headers={"Authorization": "Bearer wrong"})
    assert refused.status_code == 401


async def test_weight_updates_are_passed_on(client: httpx.AsyncClient, engines: Engines) -> None:
    assert (await client.post("/v1/weights", json={"path": "/models/2"})).status_code == 202
    assert engines.taken == [("/models/2", False)]
    engines.error = CheckpointError("replica group 1 (attempt 0): tensor a missing")
    answer = await client.post("/v1/weights", params={"wait": "true"}, json={"path": "/models/3"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "InvalidWeights")
    assert answer.json()["error"]["message"] == "replica group 1 (attempt 0): tensor a missing"
    for body in ({}, {"path": ""}, {"path": 3}, {"path": "/a", "way": "b"}):
        assert (await client.post("/v1/weights", json=body)).status_code == 400


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidStateError("not now", state="RUNNING", allowed=("pause",)), 409, "InvalidState"),
        (TransitionTimeoutError("engine 1 is missing"), 504, "TransitionTimeout"),
        (CoordinatorError("nobody there"), 503, "EngineUnreachable"),
    ],
)
async def test_a_signal_without_effect_returns_the_reason(
    client: httpx.AsyncClient, engines: Engines, error: Exception, status: int, code: str
) -> None:
    engines.error = error
    answer = await client.post("/v1/pause")
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert answer.json()["error"]["message"] == str(error)


async def test_a_pod_that_does_not_lead_refuses_signals(state: PodState) -> None:
    api = create_control_api(state, lambda: None, token=None, metrics=create_exposition(lambda: state.facts, None))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=api), base_url="http://10.0.0.7:9000") as client:
        answer = await client.post("/v1/pause")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "NotLeader")


class Roles:
    """Stands in for Leadership; its newest decision has epoch 5."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, int, str | None]] = []

    async def lead(self, epoch: int, lifecycle: str) -> None:
        """As the real method."""
        if epoch < 5:
            raise StaleEpochError("lead", epoch, 5)
        self.taken.append(("lead", epoch, lifecycle))

    async def step_down(self, epoch: int) -> None:
        """As the real method."""
        self.taken.append(("step-down", epoch, None))


async def test_the_role_changes_by_decisions_and_outdated_ones_are_refused(state: PodState) -> None:
    roles = Roles()
    api = create_control_api(state, lambda: None, roles=roles, token="t", metrics=lambda: b"")
    headers = {"Authorization": "Bearer t"}
    transport = httpx.ASGITransport(app=api)
    async with httpx.AsyncClient(transport=transport, base_url="http://10.0.0.7:9000", headers=headers) as client:
        assert (await client.post("/v1/lead", json={"epoch": 6, "lifecycle": "Paused"})).status_code == 200
        assert (await client.post("/v1/step-down", json={"epoch": 7})).status_code == 200
        stale = await client.post("/v1/lead", json={"epoch": 4})
        assert (stale.status_code, stale.json()["error"]["code"], stale.json()["error"]["epoch"]) == (
            409,
            "StaleEpoch",
            5,
        )
        for wrong in ({}, {"epoch": 0}, {"epoch": 8, "lifecycle": "Asleep"}):
            assert (await client.post("/v1/lead", json=wrong)).status_code == 400
        assert (await client.post("/v1/lead", json={"epoch": 9}, headers={"Authorization": ""})).status_code == 401
        state.update(is_ending=True)
        assert (await client.post("/v1/lead", json={"epoch": 9})).json()["error"]["code"] == "Draining"
    assert roles.taken == [("lead", 6, "Paused"), ("step-down", 7, None)]


async def test_a_standalone_launcher_keeps_its_role(client: httpx.AsyncClient) -> None:
    for body, way in (({"epoch": 1}, "step-down"), ({"epoch": 1}, "lead")):
        answer = await client.post(f"/v1/{way}", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "FixedRole")


async def test_a_running_engine_has_no_paused_requests(client: httpx.AsyncClient, state: PodState) -> None:
    state.update(**registered(0, 1))
    text = (await client.get("/metrics", headers={"Authorization": ""})).text
    assert 'megatron_requests_paused{replica_group="1"} 0.0' in text
    assert 'megatron_requests_running{replica_group="1"} 2.0' in text


async def test_metrics_show_the_engines_and_the_ranks(client: httpx.AsyncClient, state: PodState) -> None:
    state.update(**registered(0, state="PAUSED"))
    state.update(dropped_messages=7)
    state.update_rank(0, phase=RankPhase.SERVING)
    text = (await client.get("/metrics", headers={"Authorization": ""})).text
    assert 'megatron_engine_state{state="PAUSED"} 1.0' in text
    assert 'megatron_engine_state{state="RUNNING"} 0.0' in text
    assert 'megatron_requests_waiting{replica_group="0"} 3.0' in text
    assert 'megatron_requests_paused{replica_group="0"} 5.0' in text
    assert 'megatron_kv_usage{replica_group="0"} 0.25' in text
    assert 'megatron_replica_group_prompt_tokens_total{replica_group="0"} 0.0' in text
    assert 'megatron_replica_group_generation_tokens_total{replica_group="0"} 0.0' in text
    assert 'megatron_weight_version{replica_group="0"} 0.0' in text
    assert 'megatron_ranks{phase="Serving"} 1.0' in text
    assert "megatron_dropped_messages_total 7.0" in text


async def test_a_large_body_is_refused_while_it_is_received(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/weights", content=b'{"path": "' + b"x" * 100_000 + b'"}')
    assert answer.status_code == 413
    assert "more than 65536 bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"Origin": "http://shop.example"}, 403, "Origin: http://shop.example: pages from elsewhere"),
        ({"Origin": "http://10.0.0.7:8000"}, 403, "Origin: http://10.0.0.7:8000"),
        ({"Origin": "null"}, 403, "Origin: null"),
        ({"Host": "rebound.example:9000"}, 421, "Host: rebound.example:9000 is not a name of this server"),
        ({"Content-Type": "text/plain"}, 415, "Content-Type: text/plain: send application/json"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "Content-Type: application/x-www-form-urlencoded"),
    ],
)
async def test_a_page_from_elsewhere_can_not_control_the_engines(
    client: httpx.AsyncClient, engines: Engines, headers: dict[str, str], status: int, message: str
) -> None:
    answer = await client.post("/v1/pause", headers=headers)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert engines.taken == []


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1:9000", "[::1]:9000", "10.0.0.7", "10.0.0.7:9000"])
async def test_addresses_and_localhost_are_names_of_every_pod(
    client: httpx.AsyncClient, engines: Engines, host: str
) -> None:
    headers = {"Host": host, "Origin": f"http://{host}", "Content-Type": "application/json; charset=utf-8"}
    assert (await client.post("/v1/pause", headers=headers)).status_code == 202
    assert engines.taken == [("pause", False)]


async def test_a_pod_has_names_that_it_does_not_know(state: PodState, engines: Engines) -> None:
    metrics = create_exposition(lambda: state.facts, None)
    api = create_control_api(state, lambda: engines, token="t", metrics=metrics)
    transport = httpx.ASGITransport(app=api)
    headers = {"Authorization": "Bearer t"}
    async with httpx.AsyncClient(transport=transport, base_url="http://chat.ns.svc:9000", headers=headers) as client:
        assert (await client.post("/v1/pause")).status_code == 202
        assert (await client.post("/v1/pause", headers={"Origin": "http://shop.example"})).status_code == 403
