"""The HTTP service of an activator: passes requests on, and holds those whose model does not run."""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from yarl import URL

from megatron_operator import names
from megatron_operator.activator.limits import LimitExceeded, Limits, Usage
from megatron_operator.activator.models import POLL, ModelKey, Models, ModelUnavailable
from megatron_operator.observed_state import AdapterError

NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
RETRY_AFTER = "10"
"""Seconds after which a refused client may try again."""
CONNECT_TIMEOUT = 3.0
HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "host", "content-length"),
    }
)
"""Headers of one connection, which a proxy does not pass on (RFC 9110, 7.6.1), and those that it sets itself."""
AUTO_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that aiohttp would add to requests without them."""
MAX_BROKEN = 2
"""Connections to a running model that may break after the request was sent, before it fails: it may be the cause."""

UrlOf = Callable[[ModelKey], str]
logger = logging.getLogger("megatron_operator.activator")


def service_url(key: ModelKey) -> str:
    """Base URL of the model's Service in the cluster."""
    return f"http://{names.http_host(key.name, key.namespace)}:{names.HTTP_PORT}"


@dataclass
class Held:
    """A request that the activator has read completely."""

    request: web.Request
    key: ModelKey
    body: bytes
    response: web.StreamResponse | None = None
    """The event stream of a request that waits, once it has begun."""
    broken: int = 0
    """Connections that broke after the request was sent to a model that runs."""

    @property
    def wants_events(self) -> bool:
        """Whether the answer is to be an event stream."""
        try:
            body = json.loads(self.body)
        except (ValueError, RecursionError):
            return False
        return isinstance(body, dict) and body.get("stream") is True


class Activator:
    """Passes requests on. Paths are ``/<namespace>/<name>/<path of the model's server>``."""

    def __init__(
        self, models: Models, limits: Limits, namespaces: Collection[str] = (), url_of: UrlOf = service_url
    ) -> None:
        """No ``namespaces`` means all."""
        self._models = models
        self._limits = limits
        self._namespaces = namespaces
        self._url_of = url_of
        self.usage = Usage(limits)

    def application(self) -> web.Application:
        """The application, which opens its connections to models when it starts."""
        application = web.Application()
        application.router.add_get("/healthz", _alive)
        application.router.add_route("*", "/{namespace}/{name}/{path:.*}", self._handle)
        application.cleanup_ctx.append(self._connections)
        return application

    async def _connections(self, _: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as self._session:
            yield
        await self._models.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        key = ModelKey(request.match_info["namespace"], request.match_info["name"])
        held = Held(request, key, b"")
        size = 0
        try:
            self._check(key)
            may_send = await self._models.check(key)
            held.body, size = await self._read(request)
            return await self._serve(held, may_send=may_send)
        except LimitExceeded as error:
            return await _refuse(held, http.HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except ModelUnavailable as error:
            return await _refuse(held, error.status, str(error))
        except AdapterError as error:
            logger.warning("%s: %s", key, error)
            words = "the API server does not answer, so the state of the model is unknown"
            return await _refuse(held, http.HTTPStatus.SERVICE_UNAVAILABLE, words)
        finally:
            self.usage.remove_bytes(size)

    def _check(self, key: ModelKey) -> None:
        """Raises ModelUnavailable for anything that is not the name of a resource in the namespaces."""
        are_names = NAME.fullmatch(key.namespace) and NAME.fullmatch(key.name)
        if not are_names or (self._namespaces and key.namespace not in self._namespaces):
            raise ModelUnavailable(f"this activator serves no MegatronInference {key}", http.HTTPStatus.NOT_FOUND)

    async def _read(self, request: web.Request) -> tuple[bytes, int]:
        """The body, and the bytes that were counted for it. Raises LimitExceeded before it reads too much."""
        counted, body = request.content_length or 0, bytearray()
        self.usage.add_bytes(counted)
        try:
            async for part in request.content.iter_any():
                body += part
                if (more := len(body) - counted) > 0:
                    self.usage.add_bytes(more)
                    counted += more
        except BaseException:
            self.usage.remove_bytes(counted)
            raise
        return bytes(body), counted

    async def _serve(self, held: Held, *, may_send: bool) -> web.StreamResponse:
        answer = None
        with contextlib.suppress(AdapterError):
            answer = await self._send(held) if may_send else None
        if answer is None:
            with self.usage.request():
                answer = await self._wait(held)
        async with answer:
            return await _relay(held, answer)

    async def _send(self, held: Held) -> aiohttp.ClientResponse | None:
        """The answer of the model, whose body has not been read; None while it cannot be reached.

        Raises ModelUnavailable and AdapterError. A request whose connection broke before the answer is sent again: a
        pod that ends may have accepted it.
        """
        request = held.request
        url = URL(f"{self._url_of(held.key)}{_path_of(request)}", encoded=True)
        # Without Accept-Encoding, so that comments may precede the answer in one stream.
        dropped = {*HOP_BY_HOP, "accept-encoding"}
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in dropped]
        try:
            answer = await self._session.request(
                request.method,
                url,
                headers=headers,
                data=held.body or None,
                allow_redirects=False,
                skip_auto_headers=AUTO_HEADERS,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError):
            return None
        except aiohttp.ClientConnectionError as error:
            # A proxy on the way may accept a connection although there is no pod.
            held.broken += await self._models.activate(held.key)
            if held.broken >= MAX_BROKEN:
                words = f"the model {held.key} closed the connection {held.broken} times without an answer"
                raise ModelUnavailable(words, http.HTTPStatus.BAD_GATEWAY) from error
            return None
        if answer.status == http.HTTPStatus.SERVICE_UNAVAILABLE and not await self._models.activate(held.key):
            answer.close()  # A pod that ends; a model that runs and is overloaded may say so itself.
            return None
        return answer

    async def _wait(self, held: Held) -> aiohttp.ClientResponse:
        """The answer of the model as soon as it runs. Raises ModelUnavailable after the limit."""
        deadline = asyncio.get_running_loop().time() + self._limits.wait
        arrival = asyncio.create_task(self._arrive(held), name=f"wait for {held.key}")
        try:
            while (left := deadline - asyncio.get_running_loop().time()) > 0:
                await asyncio.wait({arrival}, timeout=min(self._limits.keep_alive, left))
                if arrival.done():
                    return arrival.result()
                await _keep_alive(held)
            words = f"the model {held.key} was not ready within {self._limits.wait:g} s"
            raise ModelUnavailable(words, http.HTTPStatus.SERVICE_UNAVAILABLE)
        finally:
            arrival.cancel()

    async def _arrive(self, held: Held) -> aiohttp.ClientResponse:
        while True:
            try:
                if await self._models.activate(held.key) and (answer := await self._send(held)) is not None:
                    return answer
            except AdapterError as error:
                logger.warning("%s: %s", held.key, error)
            await asyncio.sleep(POLL)


async def _relay(held: Held, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Pass the answer on. One that breaks breaks the client's connection too, so that it does not look complete."""
    response = held.response
    if response is not None and answer.status != http.HTTPStatus.OK:
        return await _refuse(held, answer.status, (await answer.read()).decode(errors="replace"))
    if response is None:
        response = web.StreamResponse(status=answer.status, reason=answer.reason)
        for name, value in answer.headers.items():
            if name.lower() not in HOP_BY_HOP:
                response.headers.add(name, value)
        response.content_length = answer.content_length
        await response.prepare(held.request)
    try:
        async for part in answer.content.iter_any():
            await response.write(part)
    except aiohttp.ClientError as error:
        logger.warning("%s: the answer broke: %r", held.key, error)
        if held.request.transport is not None:
            held.request.transport.abort()
        return response
    await response.write_eof()
    return response


async def _keep_alive(held: Held) -> None:
    """Send a comment to a client that waits for an event stream. Other clients get their answer in one piece."""
    if held.response is None:
        if not held.wants_events:
            return
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        held.response = web.StreamResponse(headers=headers)
        await held.response.prepare(held.request)
    await held.response.write(b": waiting for the model to start\n\n")


async def _refuse(held: Held, status: int, message: str) -> web.StreamResponse:
    """An error in OpenAI's format; as an event in a stream that has begun."""
    kind = "server_error" if status >= http.HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    error = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    if held.response is not None:
        await held.response.write(f"data: {json.dumps(error)}\n\n".encode())
        await held.response.write_eof()
        return held.response
    wait = {"Retry-After": RETRY_AFTER} if status == http.HTTPStatus.SERVICE_UNAVAILABLE else {}
    return web.json_response(error, status=status, headers=wait)


def _path_of(request: web.Request) -> str:
    """Path and query behind namespace and name, as the client encoded them."""
    return "/" + request.raw_path.split("/", 3)[3]


async def _alive(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")


async def serve(activator: Activator, host: str, port: int, stop: asyncio.Event, grace: float) -> None:
    """Serve until ``stop``; then accept no more connections, and finish the requests within ``grace`` seconds.

    Raises OSError when the port is taken.
    """
    runner = web.AppRunner(activator.application(), access_log=None, handler_cancellation=True, shutdown_timeout=grace)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        await stop.wait()
    finally:
        await runner.cleanup()
