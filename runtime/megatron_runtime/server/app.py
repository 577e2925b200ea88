"""The OpenAI endpoint as an ASGI app."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.responses import JSONResponse, Response
from starlette.middleware.cors import CORSMiddleware

from megatron_runtime.server.adapter_routes import adapter_routes
from megatron_runtime.server.anthropic.message_routes import ERROR_RESPONSES, message_routes
from megatron_runtime.server.body_limit import BodyLimit
from megatron_runtime.server.errors import formatted_error, install_error_handlers
from megatron_runtime.server.frontend_context import FrontendContext
from megatron_runtime.server.management_routes import control_routes, load_routes
from megatron_runtime.server.openai.generation_routes import generation_routes
from megatron_runtime.server.openai.model_routes import model_routes, token_routes
from megatron_runtime.server.openai.pooling_routes import pooling_routes
from megatron_runtime.server.page_routes import add_page
from megatron_runtime.server.profile_routes import profile_routes
from megatron_runtime.server.request_log import REQUEST_ID, RequestLog, access_log
from megatron_runtime.server.status_routes import status_routes

VERSION = version("megatron-inference")


def create_app(frontend: FrontendContext) -> FastAPI:
    """The app; its lifespan starts and stops the admission controller. The client must be started before."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        frontend.admission.start()
        yield
        await frontend.admission.stop()

    app = FastAPI(
        title="Megatron inference",
        version=VERSION,
        lifespan=lifespan,
        # Passed one by one: an included router adds steps to the route lookup of every request.
        routes=[route for router in _routers(frontend) for route in router.routes],
        # RequestLog creates the spans: it also propagates contexts when no spans are exported, and skips probes.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    install_error_handlers(app, ERROR_RESPONSES)
    _add_middleware(app, frontend)
    if frontend.options.http.page:
        add_page(app)
    return app


def _routers(frontend: FrontendContext) -> Iterator[APIRouter]:
    guarded = [Depends(frontend.check_key)]
    # Megatron's own server has the paths without the prefix too.
    for shown in ({"prefix": "/v1"}, {"include_in_schema": False}):
        yield generation_routes(frontend, dependencies=guarded, **shown)
        yield message_routes(frontend, dependencies=guarded, **shown)
        yield pooling_routes(frontend, dependencies=guarded, **shown)
        yield model_routes(frontend, dependencies=guarded, **shown)
        if frontend.options.http.megatron_http:
            yield profile_routes(frontend, dependencies=guarded, **shown)
    yield token_routes(frontend, dependencies=guarded)
    yield status_routes(frontend, dependencies=guarded)
    yield load_routes(frontend)
    yield control_routes(frontend)
    yield adapter_routes(frontend)
    yield _probes(frontend)
    yield _probes(frontend, prefix="/v1", include_in_schema=False)


def _add_middleware(app: FastAPI, frontend: FrontendContext) -> None:
    """The middleware that is added last handles a request first."""
    http = frontend.options.http
    app.add_middleware(BodyLimit, options=http)
    if http.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=http.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, "retry-after"],
        )
    app.add_middleware(
        RequestLog,
        metrics=frontend.metrics,
        write=access_log(http.access_log),
        respond=partial(formatted_error, ERROR_RESPONSES),
    )


def _probes(frontend: FrontendContext, **common: Any) -> APIRouter:
    router = APIRouter(tags=["probes"], **common)

    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.api_route("/ping", methods=["GET", "POST"], response_class=Response)
    async def ping() -> Response:
        return Response()

    @router.get("/ready")
    async def ready() -> JSONResponse:
        is_ready = frontend.admission.is_ready
        headers = {} if is_ready else {"Retry-After": str(frontend.options.retry_after)}
        return JSONResponse({"ready": is_ready}, status_code=200 if is_ready else 503, headers=headers)

    @router.get("/version")
    async def server_version() -> dict[str, str]:
        return {"version": VERSION}

    return router
