"""A proxy for the API server that injects faults by rules."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from aiohttp import ClientResponse, ClientSession, ClientTimeout, TCPConnector, web
from cluster_support.pki import write_kubeconfig
from multidict import CIMultiDict
from yarl import URL

OF_ONE_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}
LONGEST_LINE = 2**22
Matcher = Callable[[web.Request], bool]


@dataclass(frozen=True)
class Arrival:
    """A request and the status of its response; None: no response."""

    at: float
    method: str
    path: str
    status: int | None


@dataclass
class Rule:
    """A fault for each ``every``-th matching request, at most ``times`` times."""

    matches: Matcher
    fault: Callable[[FaultyServer, web.Request], Awaitable[web.StreamResponse]]
    every: int = 1
    times: float = float("inf")
    seen: int = 0
    done: int = field(default=0)

    def applies(self, request: web.Request) -> bool:
        """Whether the fault applies to this request."""
        if self.done >= self.times or not self.matches(request):
            return False
        self.seen += 1
        applies = self.seen % self.every == 0
        self.done += applies
        return applies


class FaultyServer:
    """An asynchronous context manager. ``rules`` may change at any time; the first that applies is used."""

    def __init__(self, kubeconfig: Path) -> None:
        self._config: dict[str, Any] = json.loads(kubeconfig.read_text())
        self._cluster = self._config["clusters"][0]["cluster"]
        self.rules: list[Rule] = []
        self.arrivals: list[Arrival] = []

    async def __aenter__(self) -> Self:
        authority = base64.b64decode(self._cluster["certificate-authority-data"]).decode()
        context = ssl.create_default_context(cadata=authority)
        no_limit = ClientTimeout(total=None)
        # Watches of ended operators stay open upstream until their next event.
        connector = TCPConnector(limit=0)
        self._session = ClientSession(
            connector=connector, auto_decompress=False, timeout=no_limit, read_bufsize=LONGEST_LINE
        )
        self._tls = context
        application = web.Application(client_max_size=2**24)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    def write_kubeconfig(self, path: Path) -> Path:
        """Writes a kubeconfig for the same user through this proxy."""
        (user,) = self._config["users"]
        write_kubeconfig(path, user["name"], {"server": self.url}, user["user"])
        return path

    def when(self, matches: Matcher, fault: Any, *, every: int = 1, times: float = float("inf")) -> Rule:
        """Adds a rule, and returns it."""
        rule = Rule(matches, fault, every, times)
        self.rules.append(rule)
        return rule

    async def pass_on(self, request: web.Request, *, lines: float = float("inf"), stall: bool = False) -> Any:
        """Forwards the request. Passes on at most ``lines`` lines of the response: then it ends, or stalls."""
        async with self._ask(request) as answer:
            response = web.StreamResponse(status=answer.status, headers=_for_others(answer.headers))
            await response.prepare(request)
            if lines == float("inf"):
                async for part in answer.content.iter_any():
                    await response.write(part)
            else:
                for _ in range(int(lines)):
                    await response.write(await answer.content.readline())
                if stall:
                    await asyncio.Event().wait()
            await response.write_eof()
        return response

    async def carry_out(self, request: web.Request) -> int:
        """Forwards the request but drops the response; returns its status."""
        async with self._ask(request) as answer:
            await answer.read()
            return answer.status

    @asynccontextmanager
    async def _ask(self, request: web.Request) -> AsyncIterator[ClientResponse]:
        url = URL(f"{self._cluster['server']}{request.raw_path}", encoded=True)
        async with self._session.request(
            request.method,
            url,
            headers=_for_others(request.headers),
            data=await request.read() or None,
            ssl=self._tls,
        ) as answer:
            yield answer

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        rule = next((rule for rule in list(self.rules) if rule.applies(request)), None)
        status: int | None = None
        try:
            response = await (rule.fault(self, request) if rule else self.pass_on(request))
            status = response.status
        finally:
            self.arrivals.append(Arrival(time.monotonic(), request.method, request.path, status))
        return response


def _for_others(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """The headers for the other side; a header may be repeated."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in OF_ONE_CONNECTION)


def writes(path: str = "", method: str = "") -> Matcher:
    """Matches writes with this text in their path."""
    return lambda request: (
        request.method in ([method] if method else ["POST", "PUT", "PATCH", "DELETE"]) and (path in request.path)
    )


def watches(plural: str = "") -> Matcher:
    """Matches watches of this kind, or of all kinds."""
    return lambda request: request.query.get("watch") == "true" and request.path.endswith(plural)


def answer(status: int, words: str, headers: Mapping[str, str] | None = None) -> Any:
    """Responds without the API server."""

    async def fault(_server: FaultyServer, _request: web.Request) -> web.StreamResponse:
        body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": words, "code": status}
        return web.json_response(body, status=status, headers=headers)

    return fault


async def cut_off(server: FaultyServer, request: web.Request) -> web.StreamResponse:
    """Carries out the request, but breaks the connection before the response."""
    await server.carry_out(request)
    assert request.transport is not None
    request.transport.abort()
    raise ConnectionResetError("connection closed by the test")


def end_after(events: int) -> Any:
    """Ends the watch after this number of events."""
    return lambda server, request: server.pass_on(request, lines=events)


async def stall(server: FaultyServer, request: web.Request) -> web.StreamResponse:
    """Keeps the watch open without events."""
    response: web.StreamResponse = await server.pass_on(request, lines=0, stall=True)
    return response


async def never_answer(_server: FaultyServer, _request: web.Request) -> web.StreamResponse:
    """Does not carry out the request, and never responds."""
    await asyncio.Event().wait()
    raise AssertionError
