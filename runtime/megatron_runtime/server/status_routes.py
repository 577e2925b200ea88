"""``GET /status``: the state of the service, for monitoring."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter

from megatron_runtime.errors import MegatronInferenceError
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.server import documentation
from megatron_runtime.server.documentation import answers
from megatron_runtime.server.frontend_context import FrontendContext
from megatron_runtime.wire.service_state import EngineView, ServiceState

FRESH_SECONDS = 0.9
"""Maximum age of a cached state, in seconds. Engines report once a second, and monitors poll about as often."""
ANSWER_SECONDS = 3.0


class ServiceWatch:
    """The state of the service, cached: at most one request to the coordinator in ``FRESH_SECONDS``."""

    def __init__(self, client: InferenceClient) -> None:
        self._client = client
        self._asking = asyncio.Lock()
        self._asked = float("-inf")
        self._known: ServiceState | None = None

    async def latest(self) -> ServiceState | None:
        """The state; None while the coordinator does not answer."""
        async with self._asking:
            if time.monotonic() - self._asked >= FRESH_SECONDS:
                try:
                    self._known = await self._client.service_state(ANSWER_SECONDS)
                except MegatronInferenceError:
                    self._known = None
                self._asked = time.monotonic()
            return self._known


def status_routes(frontend: FrontendContext, **common: Any) -> APIRouter:
    """``/status``; ``common`` as for ``model_routes``."""
    router = APIRouter(tags=["model"], **common)
    watch = ServiceWatch(frontend.client)

    @router.get("/status", responses=answers(documentation.STATUS_ANSWER))
    async def status() -> dict[str, Any]:
        service = await watch.latest()
        engines = () if service is None else service.engines
        unassigned = 0 if service is None else service.unassigned_requests
        return {
            "model": frontend.options.served_name,
            "max_model_len": frontend.options.max_sequence_length,
            "ready": frontend.admission.is_ready,
            "state": service.state if service is not None and engines else None,
            "requests_running": sum(engine.running for engine in engines),
            "requests_waiting": sum(engine.waiting for engine in engines) + unassigned,
            "replica_groups": [
                _replica_group(engine) for engine in sorted(engines, key=lambda engine: engine.replica_group)
            ],
        }

    return router


def _replica_group(engine: EngineView) -> dict[str, Any]:
    return {
        "index": engine.replica_group,
        "attempt": engine.attempt,
        "state": engine.state,
        "ready": engine.ready,
        "draining": engine.draining,
        "requests_running": engine.running,
        "requests_waiting": engine.waiting,
        "kv_usage": engine.kv_blocks_used / max(engine.kv_blocks_total, 1),
        "prompt_tokens": engine.prompt_tokens,
        "generated_tokens": engine.generated_tokens,
        "weight_version": engine.weight_version,
    }
