"""An OpenAI endpoint without a model: it echoes the input, word by word."""

import asyncio
import ipaddress
import json
import socket
from typing import Any, Self

import pytest
from aiohttp import web

FLUSH_SECONDS = 0.2
"""Time after which an API server's proxy passes on what it has."""


def own_address() -> str:
    """An address of this machine other than loopback, which an API server's proxy refuses. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has loopback addresses only, to which no API server's proxy goes")
        address = str(probe.getsockname()[0])
    if ipaddress.ip_address(address).is_loopback:
        pytest.skip("this machine has loopback addresses only, to which no API server's proxy goes")
    return address


class ChatEndpoint:
    """An asynchronous context manager; listens on ``address``, port 8000."""

    def __init__(self, address: str, *, key: str | None = None) -> None:
        self._address = address
        self._key = key
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.breaks = 0
        """The next answers whose connection ends before their first word."""
        self.may_end = asyncio.Event()
        """The endpoint waits for it before the last word of an answer."""
        self.may_end.set()

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._address, 8000).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self._key is not None and request.headers.get("X-Api-Key") != self._key:
            return web.json_response({"error": {"message": "no valid API key", "type": "x"}}, status=401)
        if not body["messages"][-1]["content"].strip("."):
            return web.json_response({"error": {"message": "messages: nothing is asked"}}, status=400)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        if self.breaks:
            self.breaks -= 1
            await answer.write(b": nothing yet\n\n")
            await asyncio.sleep(2 * FLUSH_SECONDS)
            assert request.transport is not None
            request.transport.close()
            return answer
        words = ["You said: ", *body["messages"][-1]["content"].split(" ")]
        for place, word in enumerate(words):
            if place == len(words) - 1:
                await self.may_end.wait()
            chunk = {"choices": [{"index": 0, "delta": {"content": word}}]}
            await answer.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer
