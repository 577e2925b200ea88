"""``/start_profile`` and ``/stop_profile`` as Megatron's server has them (``--megatron-http``)."""

from __future__ import annotations

import http
from typing import Any

from fastapi import APIRouter, Request

from megatron_runtime.errors import CoordinatorError
from megatron_runtime.server.control_requests import refuse_cross_origin
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.frontend_context import FrontendContext


def profile_routes(frontend: FrontendContext, **common: Any) -> APIRouter:
    """The routes; ``common`` as for ``model_routes``."""
    router = APIRouter(tags=["profile"], **common)

    @router.post("/start_profile")
    async def start_profile(request: Request) -> dict[str, str]:
        refuse_cross_origin(request)
        return await _send(frontend, "start")

    @router.post("/stop_profile")
    async def stop_profile(request: Request) -> dict[str, str]:
        refuse_cross_origin(request)
        return await _send(frontend, "stop")

    return router


async def _send(frontend: FrontendContext, action: str) -> dict[str, str]:
    client = frontend.client
    try:
        await (client.start_cuda_profiler() if action == "start" else client.stop_cuda_profiler())
    except CoordinatorError as error:
        raise ApiError(http.HTTPStatus.SERVICE_UNAVAILABLE, str(error), kind="server_error") from error
    return {"status": "ok", "action": f"{action}_profile"}
