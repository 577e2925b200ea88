"""The control API of a pod: state with long polling, lifecycle signals, the leader role, probes and metrics."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any, Protocol

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from megatron_runtime.errors import (
    CheckpointError,
    ConfigurationError,
    CoordinatorError,
    InvalidStateError,
    StaleEpochError,
    TransitionTimeoutError,
)
from megatron_runtime.headers import Headers
from megatron_runtime.launch.control_token import ControlToken
from megatron_runtime.launch.identity import Lifecycle
from megatron_runtime.launch.pod_state import PodState
from megatron_runtime.lifecycle import SIGNALS
from megatron_runtime.server.body_limit import BodyLimit
from megatron_runtime.server.cross_origin import SameOriginOnly
from megatron_runtime.server.options import HttpOptions

MAX_POLL_SECONDS = 300.0
MAX_BODY_BYTES = 64 * 2**10
BODY_SECONDS = 10.0
DEFAULT_TRANSITION = 120.0
Wait = Annotated[bool, Query()]
TransitionTimeout = Annotated[float, Query(gt=0, le=3600)]
_OPEN_PATHS = ("/healthz", "/readyz", "/metrics")
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class SignalSender(Protocol):
    """Sends lifecycle signals to the engines.

    A signal without effect raises ``InvalidStateError``, ``TransitionTimeoutError`` or ``CoordinatorError``.
    """

    async def send(self, signal: Headers, *, timeout: float, wait: bool) -> None:
        """Returns when the coordinator has accepted the signal; with ``wait``, when every engine has carried it out."""
        ...

    async def update_weights(self, path: str, *, timeout: float, wait: bool) -> None:
        """The same for new weights; ``CheckpointError`` names the engines that could not load them, and why."""
        ...

    async def profile(self, *, start: bool) -> None:
        """Every rank begins a trace of its steps, or writes it; returns when the coordinator has passed that on."""
        ...


class LeaderRole(Protocol):
    """Changes the role of the pod; ``StaleEpochError`` if a newer decision is known."""

    async def lead(self, epoch: int, lifecycle: Lifecycle) -> None:
        """Returns when the coordinator is starting, or runs already."""
        ...

    async def step_down(self, epoch: int) -> None:
        """Returns when the coordinator has ended, if there was one."""
        ...


class StepDownBody(BaseModel):
    """A decision that another pod leads."""

    model_config = ConfigDict(extra="forbid")

    epoch: int = Field(ge=1)
    """Number of the decision; pods refuse older decisions than the newest known one."""


class LeadBody(StepDownBody):
    """A decision that this pod leads."""

    lifecycle: Lifecycle = Lifecycle.RUNNING
    """The state that engines are brought to when they register with the new coordinator."""


class WeightsBody(BaseModel):
    """The weights that the engines load."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(min_length=1, max_length=4096)
    """Path of a checkpoint that every engine can read."""


class _Refused(Exception):
    def __init__(self, status: int, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"code": code, "message": message, **details}}


def create_control_api(
    state: PodState,
    sender: Callable[[], SignalSender | None],
    *,
    roles: LeaderRole | None = None,
    token: str | None,
    is_local: bool = False,
    metrics: Callable[[], bytes],
) -> FastAPI:
    """The application of the control API.

    Args:
        sender: Returns the sender of this pod's signals while this pod leads, else None.
        roles: None where the pod can neither get nor lose the role of the leader.
        token: The bearer token that clients have to send; None trusts every client.
        is_local: Whether it listens on a loopback address, where requests by other names come from web pages.
        metrics: Returns the text of ``GET /metrics``.
    """
    app = FastAPI(title="Megatron control API", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(BodyLimit, options=HttpOptions(max_body_bytes=MAX_BODY_BYTES, body_timeout=BODY_SECONDS))
    # What is added last handles a request first.
    app.add_middleware(ControlToken, token=token, open_paths=_OPEN_PATHS, refuse=_refusal)
    app.add_middleware(SameOriginOnly, is_local=is_local, refuse=_refusal)
    _install_handlers(app)
    _install_probes(app, state)
    _install_metrics(app, metrics)
    _install_state(app, state)
    _install_roles(app, state, roles)
    _install_signals(app, state, sender)  # last: its path matches every word
    return app


def create_metrics_api(metrics: Callable[[], bytes]) -> FastAPI:
    """The application of the metrics port; ``metrics`` as for the control API, which has the same for its clients."""
    app = FastAPI(title="Megatron metrics", docs_url=None, redoc_url=None, openapi_url=None)
    _install_metrics(app, metrics)
    return app


def create_download_api(state: Callable[[], dict[str, Any]], *, token: str) -> FastAPI:
    """The application of the control API of a pod that downloads a model: ``state`` returns that of ``GET /v1/state``,
    and ``token`` as for the control API."""
    app = FastAPI(title="Megatron download", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(ControlToken, token=token, refuse=_refusal)
    _install_handlers(app)

    @app.get("/v1/state")
    def read_state() -> dict[str, Any]:
        return state()

    return app


def _install_probes(app: FastAPI, state: PodState) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        ready = state.facts.ready
        return JSONResponse({"ready": ready}, status_code=200 if ready else 503)


def _install_metrics(app: FastAPI, metrics: Callable[[], bytes]) -> None:
    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(metrics(), media_type=METRICS_TYPE)


def _install_state(app: FastAPI, state: PodState) -> None:
    @app.get("/v1/state")
    async def read_state(
        after: int | None = Query(None), timeout: float = Query(30.0, ge=0, le=MAX_POLL_SECONDS)
    ) -> dict[str, Any]:
        if after is not None:
            await state.wait_for_change(after, timeout)
        return state.body()


def _install_roles(app: FastAPI, state: PodState, roles: LeaderRole | None) -> None:
    def changeable() -> LeaderRole:
        if roles is None:
            raise _Refused(409, "FixedRole", "a standalone launcher always leads")
        return roles

    @app.post("/v1/lead")
    async def lead(body: LeadBody) -> JSONResponse:
        if state.facts.is_ending:
            raise _Refused(409, "Draining", "this pod is draining; choose another leader")
        await _decide(changeable().lead(body.epoch, body.lifecycle))
        return JSONResponse({"role": "leader", "epoch": body.epoch})

    @app.post("/v1/step-down")
    async def step_down(body: StepDownBody) -> JSONResponse:
        await _decide(changeable().step_down(body.epoch))
        return JSONResponse({"role": "worker", "epoch": body.epoch})


def _install_signals(app: FastAPI, state: PodState, sender: Callable[[], SignalSender | None]) -> None:
    def leading() -> SignalSender:
        if (found := sender()) is None:
            raise _Refused(409, "NotLeader", "this pod is not the leader; send signals to the leader")
        return found

    def accepted(wait: bool) -> JSONResponse:
        body = {"accepted": True, "engineState": state.facts.engine_state}
        return JSONResponse(body, status_code=200 if wait else 202)

    @app.post("/v1/weights")
    async def update_weights(
        body: WeightsBody, wait: Wait = False, timeout: TransitionTimeout = DEFAULT_TRANSITION
    ) -> JSONResponse:
        await _send(leading().update_weights(body.path, timeout=timeout, wait=wait), state)
        return accepted(wait)

    # Megatron's server has both paths too.
    @app.post("/start_profile")
    @app.post("/v1/start_profile")
    async def start_profile() -> dict[str, str]:
        await _send(leading().profile(start=True), state)
        return {"status": "ok", "action": "start_profile"}

    @app.post("/stop_profile")
    @app.post("/v1/stop_profile")
    async def stop_profile() -> dict[str, str]:
        await _send(leading().profile(start=False), state)
        return {"status": "ok", "action": "stop_profile"}

    @app.post("/v1/{signal}")
    async def signal_engines(
        signal: str, wait: Wait = False, timeout: TransitionTimeout = DEFAULT_TRANSITION
    ) -> JSONResponse:
        if signal not in SIGNALS:
            raise _Refused(404, "NotFound", f"{signal} is not a signal; send one of {', '.join(SIGNALS)}")
        await _send(leading().send(SIGNALS[signal], timeout=timeout, wait=wait), state)
        return accepted(wait)


def _refusal(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message}}, status_code=status)


async def _decide(deciding: Coroutine[Any, Any, None]) -> None:
    try:
        await deciding
    except StaleEpochError as error:
        raise _Refused(409, "StaleEpoch", str(error), epoch=error.known) from error
    except ConfigurationError as error:
        raise _Refused(503, "CannotLead", str(error)) from error


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


def _install_handlers(app: FastAPI) -> None:
    async def refused(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, _Refused)
        return JSONResponse(error.body, status_code=error.status)

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first: Mapping[str, Any] = error.errors()[0]
        message = f"{first['loc'][-1]}: {first['msg']} (got {first.get('input')!r})"
        return _refusal(400, "InvalidRequest", message)

    async def other(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        code = "NotFound" if error.status_code == 404 else "Refused"
        response = _refusal(error.status_code, code, message)
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(_Refused, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, other)
