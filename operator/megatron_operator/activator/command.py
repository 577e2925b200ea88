"""Runs an activator against a cluster."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field

import kopf

from megatron_operator.activator.limits import Limits
from megatron_operator.activator.meters import ActivatorMeters
from megatron_operator.activator.service import Activator, Served, serve
from megatron_operator.kubernetes.api_server import ApiServer
from megatron_operator.metrics import MetricsServer
from megatron_operator.observed_state import ActionRefused, AdapterError


@dataclass(frozen=True)
class ActivatorOptions:
    """Options of an activator. Without a ``metrics_port`` there are no metrics."""

    served: Served = field(default_factory=Served)
    limits: Limits = field(default_factory=Limits)
    host: str = "0.0.0.0"
    port: int = 8080
    metrics_port: int | None = None
    drain_timeout: float = 60.0
    """Seconds that requests get to finish after SIGTERM."""


def run(options: ActivatorOptions, *, json_log: bool) -> None:
    """Serve until SIGTERM or SIGINT, and then finish the requests.

    Raises AdapterError without a cluster and for an invalid selector, OSError when a port is taken.
    """
    kopf.configure(log_format=kopf.LogFormat.JSON if json_log else kopf.LogFormat.FULL)
    asyncio.run(_activate(options))


async def _activate(options: ActivatorOptions) -> None:
    stop = asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, stop.set)
    meters = ActivatorMeters()
    metrics = MetricsServer(meters.registry)
    api = await ApiServer.connect()
    try:
        await _check_selector(api, options.served)
        if options.metrics_port is not None:
            await metrics.start(options.host, options.metrics_port)
        activator = Activator(api, options.limits, options.served, meters=meters)
        await serve(activator, options.host, options.port, stop, options.drain_timeout)
    finally:
        await metrics.stop()
        await api.close()


async def _check_selector(api: ApiServer, served: Served) -> None:
    """Raises AdapterError for a label selector that is not valid."""
    if not served.selector:
        return
    namespace = served.endpoint_namespace or next(iter(served.namespaces), "default")
    try:
        await api.select("MegatronInference", namespace, served.selector)
    except ActionRefused as refused:
        raise AdapterError(f"--selector {served.selector}: {refused}") from refused
