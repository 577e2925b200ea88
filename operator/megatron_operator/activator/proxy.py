"""Passes a request on to a model, once the model runs."""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import aiohttp
from aiohttp import web
from yarl import URL

from megatron_operator import names
from megatron_operator.activator.api_keys import KeySecrets
from megatron_operator.activator.envelope import Envelope
from megatron_operator.activator.limits import HeldBody, Limits, Usage
from megatron_operator.activator.meters import ActivatorMeters
from megatron_operator.activator.models import POLL, Availability, ModelKey, Models
from megatron_operator.activator.refusal import Refusal, unavailable
from megatron_operator.observed_state import AdapterError

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
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
"""Methods of requests that start no model: they only read (RFC 9110, 9.2.1)."""
MAX_BROKEN = 2
"""Connections to a running model that may break after the request was sent, before it fails: it may be the cause."""

UrlOf = Callable[[ModelKey], str]
logger = logging.getLogger("megatron_operator.activator")


def service_url(key: ModelKey) -> str:
    """Base URL of the model's Service in the cluster."""
    return f"http://{names.http_host(key.name, key.namespace)}:{names.HTTP_PORT}"


@dataclass
class HeldRequest:
    """A request that the activator holds until its answer begins."""

    request: web.Request
    body: HeldBody
    key: ModelKey | None = None
    """The model, once it is known."""
    path: str = "/"
    """Path and query at the model's server, as the client encoded them."""
    response: web.StreamResponse | None = None
    """The event stream of a request that waits, once it has begun."""
    broken: int = field(default=0, init=False)
    """Connections that broke after the request was sent to a model that runs."""

    @property
    def model(self) -> ModelKey:
        """The model of a request that is passed on."""
        assert self.key is not None
        return self.key

    @cached_property
    def envelope(self) -> Envelope | None:
        """The fields of the body, once it is read; None for a body that is not a JSON object."""
        return Envelope.parse(self.body.content)

    @property
    def wants_events(self) -> bool:
        """Whether the answer is to be an event stream."""
        return self.envelope is not None and self.envelope.stream

    async def read(self, timeout: float) -> None:
        """Read the body within these seconds. Raises Refusal before it holds too much."""
        self.body.check(self.request.content_length or 0)
        try:
            async with asyncio.timeout(timeout):
                async for part in self.request.content.iter_any():
                    self.body.add(part)
        except TimeoutError as error:
            words = f"the body was not received within {timeout:g} s"
            raise Refusal(words, http.HTTPStatus.REQUEST_TIMEOUT, code="body_timeout") from error


@dataclass(frozen=True)
class Proxy:
    """Sends requests to models, and holds those whose model does not run."""

    models: Models
    keys: KeySecrets
    limits: Limits
    usage: Usage
    meters: ActivatorMeters
    url_of: UrlOf
    session: aiohttp.ClientSession

    async def serve(self, held: HeldRequest) -> web.StreamResponse:
        """The answer of the model, as it was sent to the client.

        Raises Refusal and AdapterError. A model is started only for a request that carries one of its API keys, and not
        for one that only reads, such as a probe.
        """
        answer, may_send = None, await self.models.is_running(held.model)
        with contextlib.suppress(AdapterError):
            answer = await self._send(held) if may_send else None
        if answer is None:
            look = await self.models.recent(held.model)
            await self.keys.check(look.resource, held.request.headers)
            if held.request.method in SAFE_METHODS and look.availability is Availability.IDLE:
                raise unavailable(f"the model {held.model} was stopped because it was idle; a POST request starts it")
            with self.usage.request(), self.meters.waiting(held.model.namespace, held.model.name):
                answer = await self._wait(held)
        held.body.release()
        async with answer:
            return await _relay(held, answer)

    async def _send(self, held: HeldRequest) -> aiohttp.ClientResponse | None:
        """The answer of the model, whose body has not been read; None while it cannot be reached.

        Raises Refusal and AdapterError. A request whose connection broke before the answer is sent again: a pod that
        ends may have accepted it.
        """
        request = held.request
        # Without Accept-Encoding, so that comments may precede the answer in one stream.
        dropped = {*HOP_BY_HOP, "accept-encoding"}
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in dropped]
        try:
            answer = await self.session.request(
                request.method,
                URL(f"{self.url_of(held.model)}{held.path}", encoded=True),
                headers=headers,
                data=held.body.content or None,
                allow_redirects=False,
                skip_auto_headers=AUTO_HEADERS,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError):
            return None
        except aiohttp.ClientConnectionError as error:
            # A proxy on the way may accept a connection although there is no pod.
            held.broken += (await self.models.look(held.model)).is_available
            if held.broken >= MAX_BROKEN:
                words = f"the model {held.model} closed the connection {held.broken} times without an answer"
                raise Refusal(words, http.HTTPStatus.BAD_GATEWAY) from error
            return None
        if answer.status == http.HTTPStatus.SERVICE_UNAVAILABLE:
            try:
                is_overloaded = (await self.models.look(held.model)).is_available
            except BaseException:
                answer.close()
                raise
            if not is_overloaded:
                answer.close()  # A pod that ends.
                return None
        return answer

    async def _wait(self, held: HeldRequest) -> aiohttp.ClientResponse:
        """The answer of the model as soon as it runs. Raises Refusal after the limit."""
        deadline = asyncio.get_running_loop().time() + self.limits.wait
        arrival = asyncio.create_task(self._arrive(held), name=f"wait for {held.key}")
        try:
            while (left := deadline - asyncio.get_running_loop().time()) > 0:
                await asyncio.wait({arrival}, timeout=min(self.limits.keep_alive, left))
                if arrival.done():
                    return arrival.result()
                await _keep_alive(held)
            raise unavailable(f"the model {held.key} was not ready within {self.limits.wait:g} s")
        finally:
            arrival.cancel()

    async def _arrive(self, held: HeldRequest) -> aiohttp.ClientResponse:
        while True:
            try:
                if await self.models.activate(held.model) and (answer := await self._send(held)) is not None:
                    return answer
            except AdapterError as error:
                logger.warning("%s: %s", held.key, error)
            await asyncio.sleep(POLL)


async def _relay(held: HeldRequest, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Pass the answer on. One that breaks breaks the client's connection too, so that it does not look complete."""
    response = held.response
    if response is not None and answer.status != http.HTTPStatus.OK:
        return await refuse(held, Refusal((await answer.read()).decode(errors="replace"), answer.status))
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


async def _keep_alive(held: HeldRequest) -> None:
    """Send a comment to a client that waits for an event stream. Other clients get their answer in one piece."""
    if held.response is None:
        if not held.wants_events:
            return
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        held.response = web.StreamResponse(headers=headers)
        await held.response.prepare(held.request)
    await held.response.write(b": waiting for the model to start\n\n")


async def refuse(held: HeldRequest, refusal: Refusal) -> web.StreamResponse:
    """Answer with an error; as an event in a stream that has begun."""
    if held.response is not None:
        await held.response.write(f"data: {json.dumps(refusal.body)}\n\n".encode())
        await held.response.write_eof()
        return held.response
    headers = {}
    if refusal.status == http.HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = RETRY_AFTER
    if refusal.status == http.HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    response = web.json_response(refusal.body, status=refusal.status, headers=headers)
    if not held.request.content.is_eof():
        # Close the connection instead of reading the rest of the body to find the next request.
        response.headers["Connection"] = "close"
        response.force_close()
    return response
