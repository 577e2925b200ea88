"""The metrics of the operator."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client import CollectorRegistry

from megatron_operator.api.v1alpha1 import Condition, ConditionType, MegatronInferenceStatus, Phase
from megatron_operator.metrics import MAX_RESOURCE_SERIES, Meters, MetricsServer, RoundOutcome

ROUNDS, RESOURCES = "megatron_operator_reconciles_total", "megatron_operator_resources"
RESOURCE_PHASE = "megatron_operator_resource_phase"


def status(phase: Phase, reason: str = "Starting") -> MegatronInferenceStatus:
    ready = Condition(type=ConditionType.READY, status="False", reason=reason, last_transition_time="")
    return MegatronInferenceStatus(phase=phase, conditions=[ready])


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_resources_are_counted_by_phase_until_their_deletion() -> None:
    meters = Meters()
    meters.report("ns", "a", status(Phase.STARTING))
    meters.report("ns", "b", status(Phase.RUNNING))
    meters.report("ns", "a", status(Phase.RUNNING))
    assert value(meters.registry, RESOURCES, phase="Running") == 2
    assert value(meters.registry, RESOURCES, phase="Starting") == 0
    meters.forget("ns", "a")
    meters.forget("ns", "a")
    assert value(meters.registry, RESOURCES, phase="Running") == 1


def phases(meters: Meters) -> list[dict[str, str]]:
    (family,) = (each for each in meters.registry.collect() if each.name == RESOURCE_PHASE)
    assert all(sample.value == 1 for sample in family.samples)
    return [sample.labels for sample in family.samples]


def test_each_resource_has_one_series_with_its_phase_and_reason() -> None:
    meters = Meters()
    meters.report("ns", "a", status(Phase.PENDING, "Unschedulable"))
    meters.report("ns", "a", status(Phase.STARTING, "ModelLoading"))
    of_a = {"namespace": "ns", "megatroninference": "a"}
    assert phases(meters) == [{**of_a, "phase": "Starting", "reason": "ModelLoading"}]
    meters.forget("ns", "a")
    assert phases(meters) == []


def test_the_number_of_series_is_limited_and_resources_that_do_not_serve_come_first() -> None:
    meters = Meters()
    for number in range(MAX_RESOURCE_SERIES + 5):
        meters.report("ns", f"a{number:05}", status(Phase.RUNNING, "EngineRunning"))
    meters.report("ns", "z", status(Phase.FAILED, "RankExited"))
    found = phases(meters)
    assert len(found) == MAX_RESOURCE_SERIES
    assert found[0]["megatroninference"] == "z"
    assert value(meters.registry, RESOURCES, phase="Running") == MAX_RESOURCE_SERIES + 5


def test_rounds_are_counted_by_outcome() -> None:
    meters = Meters()
    with meters.round():
        pass
    with meters.round() as measured:
        measured.outcome = RoundOutcome.ERROR
    assert value(meters.registry, ROUNDS, outcome="success") == 1
    assert value(meters.registry, ROUNDS, outcome="error") == 1
    assert value(meters.registry, ROUNDS, outcome="bug") == 0
    assert value(meters.registry, "megatron_operator_reconcile_duration_seconds_count") == 2


async def test_metrics_and_health_are_served_on_one_port(unused_tcp_port: int) -> None:
    server = MetricsServer(Meters().registry)
    await server.start("127.0.0.1", unused_tcp_port)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{unused_tcp_port}", trust_env=False) as client:
            assert (await client.get("/healthz")).text == "ok\n"
            metrics = await client.get("/metrics")
            assert 'megatron_operator_resources{phase="Running"} 0.0' in metrics.text
            assert metrics.headers["content-type"].startswith("text/plain")
    finally:
        await server.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{unused_tcp_port}/healthz", trust_env=False)  # noqa: ASYNC210  # nobody listens
