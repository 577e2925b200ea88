"""Client of the control API, which the launcher of each pod serves on port 9000."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from megatron_operator.api.v1alpha1 import Lifecycle
from megatron_operator.names import CONTROL_PORT
from megatron_operator.observed_state import (
    RANK_PHASES,
    AdapterError,
    EngineState,
    Loading,
    ObservedEngine,
    ObservedReplica,
    Signal,
    SignalRefused,
)

CONNECT_TIMEOUT = 2.0
ANSWER_TIMEOUT = 5.0
MAX_ANSWER_BYTES = 256 << 10
"""A pod runs code of its user, so that its answers are limited like those of a stranger. The largest state, that of a
leader of 1024 replica groups with 64 ranks, has half of it."""
MAX_ENTRIES = 1024
"""Replica groups, or ranks, of a state."""
LONGEST_MESSAGE = 1000
"""Characters of a pod's message that the status repeats."""
KEEPALIVE_TIMEOUT = 6
"""Seconds without a keepalive reply after which the kernel breaks a connection."""
KEEPALIVE_PROBES = 3
"""Keepalive probes that the kernel sends in that time, one per second."""


class ControlApiUnreachable(AdapterError):
    """The control API did not answer, or sent an invalid answer."""


class InvalidAnswer(ControlApiUnreachable):
    """The control API sent an answer that is too large, an error, or no state."""


@dataclass(frozen=True)
class _Answer:
    """A complete answer of at most ``MAX_ANSWER_BYTES``."""

    status: int
    content: bytes

    @property
    def is_success(self) -> bool:
        return httpx.codes.is_success(self.status)

    def json(self) -> Any:
        """Raises ValueError for invalid JSON, also when it is nested too deeply."""
        try:
            return json.loads(self.content)
        except RecursionError as error:
            raise ValueError("JSON is nested too deeply") from error

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


@dataclass(frozen=True)
class RankReport:
    """One rank process of a pod. ``phase`` is one of ``RANK_PHASES``; the bytes are those of its weights."""

    rank: int
    phase: str
    loaded_bytes: int = 0
    total_bytes: int = 0
    registered: bool = False
    """Whether its engine is registered with a coordinator over an open connection. Only the first rank of a group has
    one."""


@dataclass(frozen=True)
class PodReport:
    """The fields of ``GET /v1/state`` that the operator reads. ``revision`` grows with every change."""

    revision: int
    ready: bool
    engine_state: EngineState | None = None
    auto_suspended: bool = False
    replicas: tuple[ObservedReplica, ...] = ()
    ranks: tuple[RankReport, ...] = ()
    running_requests: int = 0
    waiting_requests: int = 0
    generated_tokens: int = 0
    restarts: int = 0
    error: str = ""
    reports_leader: bool = False
    epoch: int = 0
    size: int = field(default=0, compare=False)
    """Bytes of the answer."""

    @classmethod
    def parse(cls, body: Mapping[str, Any], size: int = 0) -> Self:
        """Raises KeyError, TypeError, ValueError or OverflowError when ``body`` is not such an answer."""
        state, requests = body.get("engineState"), body.get("requests") or {}
        return cls(
            revision=int(body["revision"]),
            ready=bool(body.get("ready", False)),
            engine_state=EngineState(state) if state else None,
            auto_suspended=bool(body.get("autoSuspended", False)),
            replicas=tuple(_replica(replica) for replica in _entries(body, "replicaGroups")),
            ranks=tuple(_rank(rank) for rank in _entries(body, "ranks")),
            running_requests=int(requests.get("running", 0)),
            waiting_requests=int(requests.get("waiting", 0)),
            generated_tokens=int(body.get("generatedTokens") or 0),
            restarts=int(body.get("restarts", 0)),
            error=_error(body.get("error")),
            reports_leader=body.get("role") == "leader",
            epoch=int(body.get("epoch") or 0),
            size=size,
        )

    @property
    def rank_phase(self) -> str | None:
        """The least advanced phase of the ranks; None before a rank exists."""
        return min((rank.phase for rank in self.ranks), key=_progress, default=None)

    @property
    def registered(self) -> bool:
        """Whether a rank of the pod is registered with a coordinator."""
        return any(rank.registered for rank in self.ranks)

    @property
    def loading(self) -> Loading | None:
        """Bytes of weights that all ranks have read; None before the sizes are known."""
        total = sum(rank.total_bytes for rank in self.ranks)
        return Loading(sum(rank.loaded_bytes for rank in self.ranks), total) if total else None

    @property
    def engine(self) -> ObservedEngine:
        """The engine as the leader reports it."""
        return ObservedEngine(
            reachable=True,
            state=self.engine_state,
            auto_suspended=self.auto_suspended,
            replicas=self.replicas,
            running_requests=self.running_requests,
            waiting_requests=self.waiting_requests,
            generated_tokens=self.generated_tokens,
            message=self.error,
        )


def pod_http_client() -> httpx.AsyncClient:
    """One client for the pods of all resources, with a long poll open to each. TCP keepalive ends a poll of an
    unreachable pod within seconds.

    The client ignores proxies of the environment, which have no route to pods. It loads no certificates, because the
    control API speaks plain HTTP.
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
    """Client of the control APIs of one resource's pods; ``token`` is the control token of the keys Secret.

    The caller closes an ``http`` that it passes in; see ``pod_http_client``.
    """

    def __init__(self, token: str | None, *, port: int = CONTROL_PORT, http: httpx.AsyncClient | None = None) -> None:
        self._headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {token}"} if token else {})}
        self._port = port
        self._http = http or pod_http_client()
        self._owns_http = http is None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections that this client opened."""
        if self._owns_http:
            await self._http.aclose()

    async def state(self, address: str, *, after: int | None = None, wait: float = 0.0) -> PodReport:
        """The pod's report. With ``after``, waits up to ``wait`` seconds for a newer revision.

        Raises ControlApiUnreachable, InvalidAnswer for what is no state.
        """
        query = {} if after is None else {"after": str(after), "timeout": f"{wait:g}"}
        answer = await self._request("GET", address, "/v1/state", query, patience=ANSWER_TIMEOUT + wait)
        if answer.status != httpx.codes.OK:
            raise InvalidAnswer(f"control API at {address} answered {answer.status}: {_message(answer)}")
        try:
            return PodReport.parse(answer.json(), len(answer.content))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            cause = _printable(str(error))
            raise InvalidAnswer(f"control API at {address} sent an invalid state: {cause}") from error

    async def try_state(self, address: str) -> PodReport | ControlApiUnreachable:
        """The pod's report, or the error."""
        try:
            return await self.state(address)
        except ControlApiUnreachable as error:
            return error

    async def signal(self, address: str, signal: Signal) -> None:
        """Request a transition. Returns when the leader has accepted it; the state shows its end.

        Raises SignalRefused when the engine's state forbids the signal, ControlApiUnreachable otherwise.
        """
        answer = await self._request("POST", address, f"/v1/{signal}", {}, patience=ANSWER_TIMEOUT)
        if answer.status == httpx.codes.CONFLICT:
            raise SignalRefused(_message(answer), _allowed(answer))
        if not answer.is_success:
            raise ControlApiUnreachable(f"{signal} at {address} failed with {answer.status}: {_message(answer)}")

    async def set_role(self, address: str, *, leader: bool, epoch: int, lifecycle: Lifecycle) -> None:
        """Send the role to a pod. A pod that has a newer epoch refuses it, which is not an error.

        Raises ControlApiUnreachable.
        """
        path, body = ("/v1/lead", {"lifecycle": lifecycle.value}) if leader else ("/v1/step-down", {})
        answer = await self._request("POST", address, path, {}, ANSWER_TIMEOUT, {"epoch": epoch, **body})
        if not answer.is_success and answer.status != httpx.codes.CONFLICT:
            raise ControlApiUnreachable(f"{path} at {address} failed with {answer.status}: {_message(answer)}")

    async def _request(
        self,
        method: str,
        address: str,
        path: str,
        query: Mapping[str, str],
        patience: float,
        body: Mapping[str, Any] | None = None,
    ) -> _Answer:
        host = f"[{address}]" if ":" in address else address
        timeout = httpx.Timeout(patience, connect=CONNECT_TIMEOUT)
        url, where = f"http://{host}:{self._port}{path}", f"control API at {address}:{self._port}"
        request = self._http.build_request(method, url, params=query, json=body, headers=self._headers, timeout=timeout)
        try:
            # The timeout of httpx begins anew with each part of the answer.
            async with asyncio.timeout(CONNECT_TIMEOUT + patience):
                answer = await self._http.send(request, stream=True)
                async with aclosing(answer):
                    return _Answer(answer.status_code, await _content(answer, where))
        except httpx.HTTPError as error:
            raise ControlApiUnreachable(f"{where} does not answer: {str(error) or type(error).__name__}") from error
        except TimeoutError as error:
            limit = f"{CONNECT_TIMEOUT + patience:g} s"
            raise ControlApiUnreachable(f"{where} did not complete its answer within {limit}") from error


async def _content(answer: httpx.Response, where: str) -> bytes:
    """The body as sent: a compressed one could expand to any size, and the client asks for none."""
    encoding = answer.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise InvalidAnswer(f"{where} sent an answer with the encoding {_printable(encoding)}")
    content = bytearray()
    async for part in answer.aiter_raw():
        content += part
        if len(content) > MAX_ANSWER_BYTES:
            raise InvalidAnswer(f"{where} sent an answer of more than {MAX_ANSWER_BYTES} bytes")
    return bytes(content)


def _progress(phase: str) -> int:
    return RANK_PHASES.index(phase) if phase in RANK_PHASES else 0


def _entries(body: Mapping[str, Any], name: str) -> Any:
    entries = body.get(name) or ()
    if len(entries) > MAX_ENTRIES:
        raise ValueError(f"{name}: has {len(entries)} entries, at most {MAX_ENTRIES} are valid")
    return entries


def _replica(body: Mapping[str, Any]) -> ObservedReplica:
    return ObservedReplica(group=int(body["index"]), state=EngineState(body["state"]))


def _rank(body: Mapping[str, Any]) -> RankReport:
    return RankReport(
        rank=int(body["rank"]),
        phase=str(body["phase"]),
        loaded_bytes=int(body.get("loadedBytes") or 0),
        total_bytes=int(body.get("totalBytes") or 0),
        registered=bool(body.get("registered", False)),
    )


def _error(body: Any) -> str:
    message = body.get("message", "") if isinstance(body, Mapping) else body
    return _printable(str(message or ""))


def _printable(text: str) -> str:
    """The beginning of a text of a pod, without lone surrogates, which no API server accepts."""
    return text[:LONGEST_MESSAGE].encode(errors="replace").decode()


def _body(answer: _Answer) -> Mapping[str, Any]:
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return {"message": answer.text[:500]}
    return error if isinstance(error, Mapping) else {"message": str(error)}


def _message(answer: _Answer) -> str:
    return _printable(str(_body(answer).get("message", "")))


def _allowed(answer: _Answer) -> tuple[str, ...]:
    return tuple(str(signal) for signal in _body(answer).get("allowed") or ())
