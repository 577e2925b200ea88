"""The log endpoint of a kubelet: HTTPS at the node's address, with lines from the test."""

import asyncio
import ssl
from dataclasses import dataclass
from typing import Self

import trustme
from aiohttp import web
from cluster_support.control_plane import free_ports
from operator_support.api import Api

from megatron_operator.timestamps import seconds


@dataclass(frozen=True)
class Line:
    """A line in the container runtime's format; ``time`` like 2026-01-01T00:00:00.000000001Z."""

    time: str
    text: str


class KubeletLogs:
    """An asynchronous context manager; sets its address in the node's status."""

    def __init__(self, api: Api, node: str) -> None:
        self._api = api
        self._node = node
        self._logs: dict[str, list[Line]] = {}
        self._news = asyncio.Condition()
        self._ends = False
        self.queries: list[dict[str, str]] = []

    async def __aenter__(self) -> Self:
        (port,) = free_ports(1)
        authority = trustme.CA()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        app = web.Application()
        app.router.add_get("/containerLogs/{namespace}/{pod}/megatron", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=context).start()
        where = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        }
        await self._api.merge(f"/api/v1/nodes/{self._node}/status", {"status": where})
        return self

    async def __aexit__(self, *_: object) -> None:
        async with self._news:
            self._ends = True
            self._news.notify_all()
        await self._runner.cleanup()

    async def write(self, pod: str, *lines: tuple[str, str]) -> None:
        """Adds lines of a pod's container, each with a time of day (HH:MM:SS) of a fixed date."""
        async with self._news:
            kept = self._logs.setdefault(pod, [])
            kept.extend(Line(f"2026-01-01T{time}.000000000Z", text) for time, text in lines)
            self._news.notify_all()

    async def until_followed(self) -> None:
        """Returns once a client follows the log."""
        async with self._news:
            await self._news.wait_for(lambda: any(query.get("follow") == "true" for query in self.queries))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        async with self._news:
            self.queries.append(query)
            self._news.notify_all()
        pod = request.match_info["pod"]
        since = seconds(query["sinceTime"]) if "sinceTime" in query else 0.0
        sent = len(self._logs.get(pod, []))
        lines = [line for line in self._logs.get(pod, []) if seconds(line.time) >= since]
        if "tailLines" in query:
            lines = lines[-int(query["tailLines"]) :] if query["tailLines"] != "0" else []
        answer = web.StreamResponse()
        await answer.prepare(request)
        for line in lines:
            await answer.write(f"{line.time} {line.text}\n".encode())
        while query.get("follow") == "true" and (more := await self._beyond(pod, sent)):
            sent += len(more)
            for line in more:
                await answer.write(f"{line.time} {line.text}\n".encode())
        return answer

    async def _beyond(self, pod: str, count: int) -> list[Line]:
        """Waits for further lines; returns none at the end."""
        async with self._news:
            await self._news.wait_for(lambda: self._ends or len(self._logs.get(pod, [])) > count)
            return self._logs.get(pod, [])[count:]
