"""Routes with vLLM's names to monitor and control the service on the serving port.

Those that change or reveal more than the load need the control token.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from megatron_runtime.errors import CoordinatorError
from megatron_runtime.headers import EngineState
from megatron_runtime.server.control_requests import control
from megatron_runtime.server.documentation import answers
from megatron_runtime.server.endpoint_picker_metrics import EndpointPickerMetrics
from megatron_runtime.server.errors import ApiError, unavailable
from megatron_runtime.server.frontend_context import FrontendContext
from megatron_runtime.wire.service_state import EngineView, ServiceState

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
SIGNAL_SECONDS = 120.0
Level = Annotated[int, Query(ge=1, le=2)]
Tags = Annotated[list[str] | None, Query()]
_PARTS = {"weights", "kv_cache"}


def load_routes(frontend: FrontendContext) -> APIRouter:
    """``/metrics`` and ``/load``, which need an API key; the metrics for endpoint pickers may need none."""
    router = APIRouter(tags=["management"])

    @router.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        shows_all = await _may_see_all(frontend, request)
        return Response(_metrics(frontend, await _service(frontend), shows_all), media_type=CONTENT_TYPE_LATEST)

    @router.get("/load", dependencies=[Depends(frontend.check_key)])
    async def load() -> dict[str, int]:
        return {"server_load": frontend.admission.load}

    return router


def control_routes(frontend: FrontendContext) -> APIRouter:
    """``/server_info``, ``/sleep``, ``/wake_up``, ``/is_sleeping`` and ``/reset_prefix_cache``."""
    router = APIRouter(tags=["management"], dependencies=[Depends(frontend.check_control_token)])

    @router.get("/server_info")
    async def server_info() -> dict[str, Any]:
        options = asdict(frontend.options)
        return {"config": {name: value for name, value in options.items() if name not in _PRIVATE}}

    @router.post("/sleep", response_class=Response, responses=answers({}))
    async def sleep(request: Request, level: Level = 1, mode: str = "keep") -> Response:
        if level != 1:
            message = "level: 2 is not supported; the engine's settings decide what a suspension releases; use 1"
            raise ApiError(400, message, param="level")
        if mode != "keep":
            message = f"mode: {mode!r} is not supported; requests continue after the wake-up; use keep, or leave it out"
            raise ApiError(400, message, param="mode")
        return await _done(request, partial(frontend.client.suspend_engines, SIGNAL_SECONDS))

    @router.post("/wake_up", response_class=Response, responses=answers({}))
    async def wake_up(request: Request, tags: Tags = None) -> Response:
        if tags and set(tags) != _PARTS:
            message = f"tags: {', '.join(tags)} can't wake up alone; leave tags out, or give both weights and kv_cache"
            raise ApiError(400, message, param="tags")
        return await _done(request, partial(frontend.client.resume_engines, SIGNAL_SECONDS))

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        service = await _service(frontend)
        return {"is_sleeping": service.state == EngineState.SUSPENDED}

    @router.post("/reset_prefix_cache", response_class=Response, responses=answers({}))
    async def reset_prefix_cache(
        request: Request, reset_running_requests: bool = False, reset_external: bool = False
    ) -> Response:
        if reset_running_requests or reset_external:
            name = "reset_running_requests" if reset_running_requests else "reset_external"
            raise ApiError(400, f"{name}: is not supported by this server; leave it out", param=name)
        return await _done(request, frontend.client.reset_prefix_cache)

    return router


_PRIVATE = ("api_keys_file", "metrics_folder")
"""Options that name files of the server."""


async def _service(frontend: FrontendContext) -> ServiceState:
    try:
        return await frontend.client.service_state()
    except CoordinatorError as error:
        raise unavailable(str(error), retry_after=frontend.options.retry_after) from error


async def _done(request: Request, act: Callable[[], Awaitable[None]]) -> Response:
    """An empty response when the engines have done it."""
    await control(request, act)
    return Response()


async def _may_see_all(frontend: FrontendContext, request: Request) -> bool:
    """Whether a client sees all metrics, or only those for endpoint pickers, which send no key.

    Raises:
        ApiError: 401 for a wrong key, and for none where endpoint pickers need one too.
    """
    is_open = frontend.api_keys is not None and frontend.options.http.picker_metrics_without_key
    if is_open and not any(header in request.headers for header in ("authorization", "x-api-key")):
        return False
    await frontend.check_key(request)
    return True


def _metrics(frontend: FrontendContext, service: ServiceState, shows_all: bool) -> bytes:
    """The metrics for endpoint pickers; with ``shows_all`` also those of all frontends of this pod and of the engines.

    Without, there are no names of adapters either.
    """
    registry = CollectorRegistry()
    if shows_all:
        if folder := os.environ.get(FOLDER_VARIABLE):
            MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
        registry.register(_Engines(service.engines))
    options = frontend.options
    registry.register(EndpointPickerMetrics(service, options.served_name, options.max_loras, names_adapters=shows_all))
    return generate_latest(registry)


class _Engines(Collector):
    """The load of the engines, under the names of the pod's metrics."""

    def __init__(self, engines: tuple[EngineView, ...]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        """One value per replica group."""
        for name, documentation, read in _GAUGES:
            family = GaugeMetricFamily(name, documentation, labels=["replica_group"])
            for engine in self._engines:
                family.add_metric([str(engine.replica_group)], read(engine))
            yield family


_GAUGES: tuple[tuple[str, str, Callable[[EngineView], float]], ...] = (
    ("megatron_requests_running", "Requests in the running batch", lambda engine: engine.running),
    ("megatron_requests_waiting", "Requests in the queue", lambda engine: engine.waiting),
    (
        "megatron_kv_usage",
        "Used part of the KV cache, 0 to 1",
        lambda engine: engine.kv_blocks_used / max(engine.kv_blocks_total, 1),
    ),
)
