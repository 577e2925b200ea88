"""A proxy before the API server that misbehaves by rule: what goes wrong between an operator and its API server."""

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
    """A request that came, and what it got; status None: no answer."""

    at: float
    method: str
    path: str
    status: int | None


@dataclass
class Rule:
    """What becomes of each ``every``-th request that matches, ``times`` times at most."""

    matches: Matcher
    fault: Callable[[FaultyServer, web.Request], Awaitable[web.StreamResponse]]
    every: int = 1
    times: float = float("inf")
    seen: int = 0
    done: int = field(default=0)

    def strikes(self, request: web.Request) -> bool:
        """Whether it is this one's turn."""
        if self.done >= self.times or not self.matches(request):
            return False
        self.seen += 1
        strikes = self.seen % self.every == 0
        self.done += strikes
        return strikes


class FaultyServer:
    """Used as an asynchronous context manager. ``rules`` may change at any time; the first that strikes counts."""

    def __init__(self, kubeconfig: Path) -> None:
        self._config: dict[str, Any] = json.loads(kubeconfig.read_text())
        self._cluster = self._config["clusters"][0]["cluster"]
        self.rules: list[Rule] = []
        self.arrivals: list[Arrival] = []

    async def __aenter__(self) -> Self:
        authority = base64.b64decode(self._cluster["certificate-authority-data"]).decode()
        context = ssl.create_default_context(cadata=authority)
        no_limit = ClientTimeout(total=None)
        # Watches of operators that have gone stay open upstream until they have something to tell.
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
        """The same user, but through here."""
        (user,) = self._config["users"]
        write_kubeconfig(path, user["name"], {"server": self.url}, user["user"])
        return path

    def when(self, matches: Matcher, fault: Any, *, every: int = 1, times: float = float("inf")) -> Rule:
        """Adds a rule, and returns it."""
        rule = Rule(matches, fault, every, times)
        self.rules.append(rule)
        return rule

    async def pass_on(self, request: web.Request, *, lines: float = float("inf"), stall: bool = False) -> Any:
        """Asks the API server. At most so many lines of its answer are handed on: then it ends, or falls silent."""
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
        """Asks the API server, and keeps the answer; its status."""
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
        rule = next((rule for rule in list(self.rules) if rule.strikes(request)), None)
        status: int | None = None
        try:
            response = await (rule.fault(self, request) if rule else self.pass_on(request))
            status = response.status
        finally:
            self.arrivals.append(Arrival(time.monotonic(), request.method, request.path, status))
        return response


def _for_others(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """A header may come more than once."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in OF_ONE_CONNECTION)


def writes(path: str = "", method: str = "") -> Matcher:
    """Requests that change something, with this in their path."""
    return lambda request: (
        request.method in ([method] if method else ["POST", "PUT", "PATCH", "DELETE"]) and (path in request.path)
    )


def watches(plural: str = "") -> Matcher:
    """Watches of this kind, or of all."""
    return lambda request: request.query.get("watch") == "true" and request.path.endswith(plural)


def answer(status: int, words: str, headers: Mapping[str, str] | None = None) -> Any:
    """This, without asking the API server."""

    async def fault(_server: FaultyServer, _request: web.Request) -> web.StreamResponse:
        body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": words, "code": status}
        return web.json_response(body, status=status, headers=headers)

    return fault


async def cut_off(server: FaultyServer, request: web.Request) -> web.StreamResponse:
    """The request is carried out, but the connection breaks before the answer."""
    await server.carry_out(request)
    assert request.transport is not None
    request.transport.abort()
    raise ConnectionResetError("cut off on purpose")


def end_after(events: int) -> Any:
    """The watch ends after so many events."""
    return lambda server, request: server.pass_on(request, lines=events)


async def stall(server: FaultyServer, request: web.Request) -> web.StreamResponse:
    """The watch stays open and says nothing."""
    response: web.StreamResponse = await server.pass_on(request, lines=0, stall=True)
    return response


async def never_answer(_server: FaultyServer, _request: web.Request) -> web.StreamResponse:
    """The request is not carried out, and its sender waits for as long as it likes."""
    await asyncio.Event().wait()
    raise AssertionError
