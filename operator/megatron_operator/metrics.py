"""The operator's metrics and health endpoint."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from megatron_operator.api.v1alpha1 import ConditionType, MegatronInferenceStatus, Phase

MAX_RESOURCE_SERIES = 2000
"""Resources with a series of their own; beyond, those that serve have none."""
SERVING_PHASES = (Phase.RUNNING, Phase.PAUSED, Phase.SUSPENDED, Phase.STOPPED)


class RoundOutcome(StrEnum):
    """Outcome of a reconcile round."""

    SUCCESS = "success"
    ERROR = "error"
    """The API server or a pod refused or failed; the operator retries."""
    BUG = "bug"
    """The operator itself failed; it retries, and the log has the traceback."""


@dataclass
class Measured:
    """A round that is being measured."""

    outcome: RoundOutcome = RoundOutcome.SUCCESS


class _ResourcePhases(Collector):
    """The phase of each resource, as one series that disappears with the resource."""

    def __init__(self) -> None:
        self.phases: dict[tuple[str, str], tuple[Phase, str]] = {}
        """Phase and reason of the condition Ready, by namespace and name."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "megatron_operator_resource_phase",
            "1 for the phase of each MegatronInference resource, with the reason of its condition Ready.",
            labels=("namespace", "megatroninference", "phase", "reason"),
        )
        order = sorted(self.phases.items(), key=lambda item: (item[1][0] in SERVING_PHASES, item[0]))
        for key, (phase, reason) in order[:MAX_RESOURCE_SERIES]:
            family.add_metric((*key, phase.value, reason), 1)
        yield family


class Meters:
    """The operator's own metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._rounds = Counter(
            "megatron_operator_reconciles",
            "Reconcile rounds of all resources, by outcome.",
            ["outcome"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "megatron_operator_reconcile_duration_seconds",
            "Duration of a reconcile round, including requests to the API server and to pods.",
            registry=self.registry,
        )
        self._resources = Gauge(
            "megatron_operator_resources",
            "MegatronInference resources, by phase.",
            ["phase"],
            registry=self.registry,
        )
        self._leading = Gauge(
            "megatron_operator_leading",
            "1 while this operator holds the Lease and acts, 0 while it stands by.",
            registry=self.registry,
        )
        self._fleet_rollout = Gauge(
            "megatron_operator_fleet_rollout_resources",
            "MegatronInference resources, by the image of their pods: the operator's current default, an earlier one"
            " (waiting for their turn, or paused by their own rollout), or upgrading.",
            ["state"],
            registry=self.registry,
        )
        self._each = _ResourcePhases()
        self.registry.register(self._each)
        for outcome in RoundOutcome:
            self._rounds.labels(outcome.value)
        self._count_phases()

    @contextmanager
    def round(self) -> Iterator[Measured]:
        """Measures the block. The block may set another outcome than success."""
        started, measured = time.perf_counter(), Measured()
        try:
            yield measured
        finally:
            self._seconds.observe(time.perf_counter() - started)
            self._rounds.labels(measured.outcome.value).inc()

    def set_leading(self, leading: bool) -> None:
        """Set whether this operator holds the Lease."""
        self._leading.set(leading)

    def report(self, namespace: str, name: str, status: MegatronInferenceStatus) -> None:
        """Set the phase of a resource from its status."""
        ready = status.condition(ConditionType.READY)
        self._each.phases[namespace, name] = status.phase, ready.reason if ready is not None else ""
        self._count_phases()

    def fleet_rollout(self, state: str, count: int) -> None:
        """Set the number of resources whose image is in this state."""
        self._fleet_rollout.labels(state).set(count)

    def forget(self, namespace: str, name: str) -> None:
        """Remove a resource that was deleted."""
        self._each.phases.pop((namespace, name), None)
        self._count_phases()

    def _count_phases(self) -> None:
        tally = Tally(phase for phase, _ in self._each.phases.values())
        for phase in Phase:
            self._resources.labels(phase.value).set(tally[phase])


class MetricsServer:
    """Serves ``/metrics`` and ``/healthz`` on the event loop, so that a process that hangs fails its probe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> None:
        """Raises OSError when the port is taken."""
        application = web.Application()
        application.add_routes([web.get("/metrics", self._metrics), web.get("/healthz", _alive)])
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()

    async def stop(self) -> None:
        """Close the port, if it is open."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _alive(_request: web.Request) -> web.Response:
    return web.Response(text="ok\n")
