"""The control API of a pod: its state with long polling, the lifecycle signals, probes and metrics."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any, Protocol

from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from megatron_runtime.data_parallel_inference_coordinator import states
from megatron_runtime.errors import CheckpointError, CoordinatorError, InvalidStateError, TransitionTimeoutError
from megatron_runtime.launch.pod_state import PodState

SIGNALS = tuple(signal.name.lower() for signal in states.SIGNALS)
LONGEST_POLL = 300.0
DEFAULT_TRANSITION = 120.0
Wait = Annotated[bool, Query()]
TransitionTimeout = Annotated[float, Query(gt=0, le=3600)]
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class SignalSender(Protocol):
    """Sends lifecycle signals to the engines.

    ``InvalidStateError``, ``TransitionTimeoutError`` and ``CoordinatorError`` say why one had no effect.
    """

    async def send(self, signal: str, *, timeout: float, wait: bool) -> None:
        """Returns when the coordinator accepted the signal; with ``wait``, when every engine has obeyed."""
        ...

    async def update_weights(self, path: str, *, timeout: float, wait: bool) -> None:
        """The same for new weights; ``CheckpointError`` says which engines could not load them, and why."""
        ...


class WeightsBody(BaseModel):
    """Which weights the engines are to load."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(min_length=1, max_length=4096)
    """Of a checkpoint, as every engine sees it."""


class _Refused(Exception):
    def __init__(self, status: int, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"code": code, "message": message, **details}}


def create_control_api(
    state: PodState, sender: SignalSender | None, *, token: str | None, metrics: Callable[[], bytes]
) -> FastAPI:
    """``sender`` is None on pods that do not lead; without a ``token`` whoever reaches the socket is trusted."""
    app = FastAPI(title="Megatron control API", docs_url=None, redoc_url=None, openapi_url=None)
    _install_handlers(app)
    guarded = [Depends(_bearer(token))]

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        ready = state.facts.ready
        return JSONResponse({"ready": ready}, status_code=200 if ready else 503)

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(metrics(), media_type=METRICS_TYPE)

    @app.get("/v1/state", dependencies=guarded)
    async def read_state(
        after: int | None = Query(None), timeout: float = Query(30.0, ge=0, le=LONGEST_POLL)
    ) -> dict[str, Any]:
        if after is not None:
            await state.wait_for_change(after, timeout)
        return state.body()

    def leading() -> SignalSender:
        if sender is None:
            raise _Refused(409, "NotLeader", "this pod does not lead; send signals to the leader")
        return sender

    def accepted(wait: bool) -> JSONResponse:
        body = {"accepted": True, "engineState": state.facts.engine_state}
        return JSONResponse(body, status_code=200 if wait else 202)

    @app.post("/v1/weights", dependencies=guarded)
    async def update_weights(
        body: WeightsBody, wait: Wait = False, timeout: TransitionTimeout = DEFAULT_TRANSITION
    ) -> JSONResponse:
        await _send(leading().update_weights(body.path, timeout=timeout, wait=wait), state)
        return accepted(wait)

    @app.post("/v1/{signal}", dependencies=guarded)
    async def signal_engines(
        signal: str, wait: Wait = False, timeout: TransitionTimeout = DEFAULT_TRANSITION
    ) -> JSONResponse:
        if signal not in SIGNALS:
            raise _Refused(404, "NotFound", f"{signal} is no signal; send one of {', '.join(SIGNALS)}")
        await _send(leading().send(signal, timeout=timeout, wait=wait), state)
        return accepted(wait)

    return app


async def _send(sending: Coroutine[Any, Any, None], state: PodState) -> None:
    try:
        await sending
    except CheckpointError as error:
        raise _Refused(422, "InvalidWeights", str(error)) from error
    except InvalidStateError as error:
        raise _Refused(409, "InvalidState", str(error), engineState=error.state, allowed=list(error.allowed)) from error
    except TransitionTimeoutError as error:
        raise _Refused(504, "TransitionTimeout", str(error), engineState=state.facts.engine_state) from error
    except CoordinatorError as error:
        raise _Refused(503, "EngineUnreachable", str(error)) from error


def _bearer(token: str | None) -> Callable[[Request], None]:
    def check(request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise _Refused(401, "Unauthorized", "send the control token as Authorization: Bearer <token>")

    return check


def _install_handlers(app: FastAPI) -> None:
    async def refused(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, _Refused)
        return JSONResponse(error.body, status_code=error.status)

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first: Mapping[str, Any] = error.errors()[0]
        message = f"{first['loc'][-1]}: {first['msg']} (got {first.get('input')!r})"
        return JSONResponse({"error": {"code": "InvalidRequest", "message": message}}, status_code=400)

    async def other(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        code = "NotFound" if error.status_code == 404 else "Refused"
        return JSONResponse({"error": {"code": code, "message": message}}, status_code=error.status_code)

    app.add_exception_handler(_Refused, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, other)
