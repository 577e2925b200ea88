"""Client of the control API that the launcher in every pod answers on port 9000."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import httpx

from megatron_operator.api.v1alpha1 import Lifecycle
from megatron_operator.names import CONTROL_PORT
from megatron_operator.world import (
    RANK_PHASES,
    EngineState,
    Loading,
    ObservedEngine,
    ObservedReplica,
    Signal,
    SignalRefused,
    WorldError,
)

CONNECT_TIMEOUT = 2.0
ANSWER_TIMEOUT = 5.0
KEEPALIVE_TIMEOUT = 6
"""Seconds without a sign of life after which a connection counts as broken."""
KEEPALIVE_PROBES = 3
"""How many are asked for in vain by then, a second apart."""


class ControlApiUnreachable(WorldError):
    """The control API did not answer, or not in its own language."""


@dataclass(frozen=True)
class RankReport:
    """One rank process of a pod. ``phase`` is one of ``RANK_PHASES``; the bytes are of its weights."""

    rank: int
    phase: str
    loaded_bytes: int = 0
    total_bytes: int = 0
    registered: bool = False
    """Whether a coordinator knows its engine over a connection that lasts; only first ranks of a group have one."""


@dataclass(frozen=True)
class PodReport:
    """What the operator reads of the answer to ``GET /v1/state``; ``revision`` grows with every change."""

    revision: int
    ready: bool
    engine_state: EngineState | None = None
    auto_suspended: bool = False
    replicas: tuple[ObservedReplica, ...] = ()
    ranks: tuple[RankReport, ...] = ()
    running_requests: int = 0
    waiting_requests: int = 0
    restarts: int = 0
    error: str = ""
    reports_leader: bool = False
    epoch: int = 0

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Raises KeyError, TypeError or ValueError when ``body`` is no such answer."""
        state, requests = body.get("engineState"), body.get("requests") or {}
        return cls(
            revision=int(body["revision"]),
            ready=bool(body.get("ready", False)),
            engine_state=EngineState(state) if state else None,
            auto_suspended=bool(body.get("autoSuspended", False)),
            replicas=tuple(_replica(replica) for replica in body.get("replicas") or ()),
            ranks=tuple(_rank(rank) for rank in body.get("ranks") or ()),
            running_requests=int(requests.get("running", 0)),
            waiting_requests=int(requests.get("waiting", 0)),
            restarts=int(body.get("restarts", 0)),
            error=_error(body.get("error")),
            reports_leader=body.get("role") == "leader",
            epoch=int(body.get("epoch") or 0),
        )

    @property
    def rank_phase(self) -> str | None:
        """The least advanced phase among the ranks; None before there is one."""
        return min((rank.phase for rank in self.ranks), key=_progress, default=None)

    @property
    def registered(self) -> bool:
        """Whether a rank of the pod hears a coordinator that knows it."""
        return any(rank.registered for rank in self.ranks)

    @property
    def loading(self) -> Loading | None:
        """Bytes of weights read by all ranks; None before the sizes are known."""
        total = sum(rank.total_bytes for rank in self.ranks)
        return Loading(sum(rank.loaded_bytes for rank in self.ranks), total) if total else None

    @property
    def engine(self) -> ObservedEngine:
        """What a leader's report says about the engine."""
        return ObservedEngine(
            reachable=True,
            state=self.engine_state,
            auto_suspended=self.auto_suspended,
            replicas=self.replicas,
            running_requests=self.running_requests,
            waiting_requests=self.waiting_requests,
            message=self.error,
        )


def pod_http_client() -> httpx.AsyncClient:
    """For any number of pods, also of many resources, with a long poll open to each. The kernel asks idle connections
    for a sign of life, so that a poll of a pod that is cut off ends soon, and costs nobody anything until then.

    Pods are reached directly, since a proxy of the operator's own environment has no way to them, and by plain HTTP:
    certificates, which take long to load, are of no use.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    transport = httpx.AsyncHTTPTransport(
        trust_env=False, limits=limits, verify=False, socket_options=_keepalive_options()
    )
    return httpx.AsyncClient(trust_env=False, transport=transport)


def _keepalive_options() -> list[tuple[int, int, int]]:
    """Socket options that break a connection ``KEEPALIVE_TIMEOUT`` seconds after its peer became unreachable."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    if sys.platform == "linux":
        options += [
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_TIMEOUT - KEEPALIVE_PROBES),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
        ]
    return options


class ControlClient:
    """Talks to the launchers of one resource's pods; ``token`` is the Secret's control-token.

    An ``http`` that is handed in stays open; see ``pod_http_client``.
    """

    def __init__(self, token: str | None, *, port: int = CONTROL_PORT, http: httpx.AsyncClient | None = None) -> None:
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._port = port
        self._http = http or pod_http_client()
        self._owns_http = http is None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes its own connections."""
        if self._owns_http:
            await self._http.aclose()

    async def state(self, address: str, *, after: int | None = None, wait: float = 0.0) -> PodReport:
        """The pod's report; with ``after``, waits up to ``wait`` seconds for a revision beyond it.

        Raises EngineUnreachable.
        """
        query = {} if after is None else {"after": str(after), "timeout": f"{wait:g}"}
        answer = await self._request("GET", address, "/v1/state", query, patience=ANSWER_TIMEOUT + wait)
        if answer.status_code != httpx.codes.OK:
            raise ControlApiUnreachable(f"control API at {address} answered {answer.status_code}: {_message(answer)}")
        try:
            return PodReport.parse(answer.json())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ControlApiUnreachable(
                f"control API at {address} sent a state that makes no sense: {error}"
            ) from error

    async def try_state(self, address: str) -> PodReport | ControlApiUnreachable:
        """The pod's report, or why there is none."""
        try:
            return await self.state(address)
        except ControlApiUnreachable as error:
            return error

    async def signal(self, address: str, signal: Signal) -> None:
        """Asks for a transition and returns once it is accepted; its end shows in the state.

        Raises SignalRefused when the engine's state forbids it, EngineUnreachable otherwise.
        """
        answer = await self._request("POST", address, f"/v1/{signal}", {}, patience=ANSWER_TIMEOUT)
        if answer.status_code == httpx.codes.CONFLICT:
            raise SignalRefused(_message(answer), _allowed(answer))
        if not answer.is_success:
            raise ControlApiUnreachable(
                f"{signal} at {address} was answered with {answer.status_code}: {_message(answer)}"
            )

    async def set_role(self, address: str, *, leader: bool, epoch: int, lifecycle: Lifecycle) -> None:
        """Tells a pod whether it leads; one that knows of a later decision refuses, and is left alone.

        Raises EngineUnreachable.
        """
        path, body = ("/v1/lead", {"lifecycle": lifecycle.value}) if leader else ("/v1/follow", {})
        answer = await self._request("POST", address, path, {}, ANSWER_TIMEOUT, {"epoch": epoch, **body})
        if not answer.is_success and answer.status_code != httpx.codes.CONFLICT:
            raise ControlApiUnreachable(
                f"{path} at {address} was answered with {answer.status_code}: {_message(answer)}"
            )

    async def _request(
        self,
        method: str,
        address: str,
        path: str,
        query: Mapping[str, str],
        patience: float,
        body: Mapping[str, Any] | None = None,
    ) -> httpx.Response:
        host = f"[{address}]" if ":" in address else address
        timeout = httpx.Timeout(patience, connect=CONNECT_TIMEOUT)
        try:
            return await self._http.request(
                method,
                f"http://{host}:{self._port}{path}",
                params=query,
                json=body,
                headers=self._headers,
                timeout=timeout,
            )
        except httpx.HTTPError as error:
            cause = str(error) or type(error).__name__
            raise ControlApiUnreachable(f"control API at {address}:{self._port} does not answer: {cause}") from error


def _progress(phase: str) -> int:
    return RANK_PHASES.index(phase) if phase in RANK_PHASES else 0


def _replica(body: Mapping[str, Any]) -> ObservedReplica:
    return ObservedReplica(group=int(body["group"]), state=EngineState(body["state"]))


def _rank(body: Mapping[str, Any]) -> RankReport:
    return RankReport(
        rank=int(body["rank"]),
        phase=str(body["phase"]),
        loaded_bytes=int(body.get("loadedBytes") or 0),
        total_bytes=int(body.get("totalBytes") or 0),
        registered=bool(body.get("registered", False)),
    )


def _error(body: Any) -> str:
    if isinstance(body, Mapping):
        return str(body.get("message", ""))
    return str(body or "")


def _body(answer: httpx.Response) -> Mapping[str, Any]:
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return {"message": answer.text[:500]}
    return error if isinstance(error, Mapping) else {"message": str(error)}


def _message(answer: httpx.Response) -> str:
    return str(_body(answer).get("message", ""))


def _allowed(answer: httpx.Response) -> tuple[str, ...]:
    return tuple(str(signal) for signal in _body(answer).get("allowed") or ())
