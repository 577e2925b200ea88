"""The metrics of the operator."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client import CollectorRegistry

from megatron_operator.api.v1alpha1 import Phase
from megatron_operator.metrics import Meters, MetricsServer, RoundOutcome

ROUNDS, RESOURCES = "megatron_operator_reconciles_total", "megatron_operator_resources"


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_resources_are_counted_by_phase_until_their_deletion() -> None:
    meters = Meters()
    meters.phase("ns", "a", Phase.STARTING)
    meters.phase("ns", "b", Phase.RUNNING)
    meters.phase("ns", "a", Phase.RUNNING)
    assert value(meters.registry, RESOURCES, phase="Running") == 2
    assert value(meters.registry, RESOURCES, phase="Starting") == 0
    meters.forget("ns", "a")
    meters.forget("ns", "a")
    assert value(meters.registry, RESOURCES, phase="Running") == 1


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
    server = MetricsServer(Meters())
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
