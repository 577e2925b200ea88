"""The HTTP service of an activator."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

import aiohttp
from aiohttp import web

from megatron_operator.activator.api_keys import KeySecrets, rule_of
from megatron_operator.activator.catalog import Catalog, ResourceLists
from megatron_operator.activator.connections import Connections, address_of
from megatron_operator.activator.endpoint import ModelEndpoint
from megatron_operator.activator.limits import Limits, Usage
from megatron_operator.activator.meters import DISCONNECTED, ActivatorMeters
from megatron_operator.activator.models import ModelKey, Models, Resources
from megatron_operator.activator.proxy import CONNECT_TIMEOUT, HeldRequest, Proxy, UrlOf, refuse, service_url
from megatron_operator.activator.refusal import Refusal, unavailable
from megatron_operator.observed_state import AdapterError

NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
ENDPOINT_SECONDS = 2.0
"""Seconds after SIGTERM until all nodes know that the pod leaves its Service."""
LAST_IDLE_SECONDS = 6.0
"""Seconds after SIGTERM until connections without a request are closed; common clients keep one for five."""
LINGERING_SECONDS = 2.0
"""Seconds in which the rest of a refused body is read and dropped, so that its client reads the answer."""

Answer = Callable[[HeldRequest], Awaitable[web.StreamResponse]]
logger = logging.getLogger("megatron_operator.activator")


class Cluster(Resources, ResourceLists, Protocol):
    """The part of the API server's client that an activator needs."""


@dataclass(frozen=True)
class Served:
    """The resources that an activator serves."""

    namespaces: tuple[str, ...] = ()
    """None means all."""
    endpoint_namespace: str = ""
    """Namespace of the models at ``/v1``. By default the only one of ``namespaces``."""
    selector: str = ""
    """Label selector of the models at ``/v1`` and ``/<namespace>/v1``."""

    def endpoint(self) -> str:
        """The namespace of the models at ``/v1``. Raises Refusal when there is none."""
        if self.endpoint_namespace:
            return self.endpoint_namespace
        if len(self.namespaces) != 1:
            fix = "use /<namespace>/v1, or set --endpoint-namespace of the activator"
            raise Refusal(f"there is no namespace for /v1; {fix}", HTTPStatus.NOT_FOUND, code="not_found")
        return self.namespaces[0]


class Activator:
    """Passes requests on, by their path or by ``model`` in their body.

    | path | model |
    |---|---|
    | ``/<namespace>/<name>/<path of the model's server>`` | that of the resource |
    | ``/<namespace>/v1/<path>`` | of that name in the namespace |
    | ``/v1/<path>`` | the same, in one namespace |
    """

    def __init__(
        self,
        resources: Cluster,
        limits: Limits,
        served: Served | None = None,
        url_of: UrlOf = service_url,
        meters: ActivatorMeters | None = None,
    ) -> None:
        self._limits = limits
        self._served = served or Served()
        self._catalog = Catalog(resources, self._served.selector)
        self._url_of = url_of
        self._meters = meters or ActivatorMeters()
        self._models = Models(resources, self._meters)
        self._keys = KeySecrets(resources)
        self._is_draining = False
        self.usage = Usage(limits)
        self.connections = Connections(limits)
        self._meters.watch_bodies(lambda: self.usage.body_bytes)

    def application(self) -> web.Application:
        """The application, which opens its connections to models when it starts."""
        application = web.Application(middlewares=[self.connections.middleware])
        application.router.add_get("/healthz", _alive)
        for path in ("/v1/{path:.*}", "/{namespace}/v1/{path:.*}"):
            application.router.add_route("*", path, self._answered(self._by_model))
        application.router.add_route("*", "/{namespace}/{name}/{path:.*}", self._answered(self._by_path))
        application.cleanup_ctx.append(self._connections)
        application.on_response_prepare.append(self._close_connection)
        return application

    def drain(self) -> None:
        """Close each connection after its next answer, so that its client connects to another activator."""
        self._is_draining = True

    async def _connections(self, _: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            models, keys, usage = self._models, self._keys, self.usage
            self._proxy = Proxy(models, keys, self._limits, usage, self._meters, self._url_of, session)
            yield
        await self._models.close()
        await self._keys.close()
        await self._catalog.close()

    async def _close_connection(self, _: web.Request, response: web.StreamResponse) -> None:
        if self._is_draining:
            response.force_close()
            response.headers["Connection"] = "close"

    def _answered(self, answer: Answer) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """A handler with the errors of ``answer`` as answers, and with metrics."""

        async def handle(request: web.Request) -> web.StreamResponse:
            held, status = HeldRequest(request, self.usage.body(address_of(request.transport))), DISCONNECTED
            try:
                response = await self._response(held, answer)
                status = str(response.status)
                return response
            finally:
                held.body.release()
                model = held.key
                self._meters.answered(model.namespace if model else "", model.name if model else "", status)

        return handle

    async def _response(self, held: HeldRequest, answer: Answer) -> web.StreamResponse:
        try:
            return await answer(held)
        except Refusal as refusal:
            return await refuse(held, refusal)
        except AdapterError as error:
            logger.warning("%s: %s", held.key or held.request.path, error)
            return await refuse(held, unavailable("the API server does not answer, so the model's state is unknown"))

    async def _by_path(self, held: HeldRequest) -> web.StreamResponse:
        key = ModelKey(held.request.match_info["namespace"], held.request.match_info["name"])
        self._check(key.namespace, key.name)
        await self._models.is_running(key)
        held.key, held.path = key, _path_behind(held.request, 2)
        if held.request.body_exists and (look := self._models.last(key)) is not None:
            held.body.longest = await self._keys.longest_body([rule_of(look.resource)], held.request.headers)
        await held.read(self._limits.body_timeout)
        return await self._proxy.serve(held)

    async def _by_model(self, held: HeldRequest) -> web.StreamResponse:
        given = held.request.match_info.get("namespace")
        namespace = given if given is not None else self._served.endpoint()
        self._check(namespace)
        held.path = _path_behind(held.request, 0 if given is None else 1)
        endpoint = ModelEndpoint(self._catalog, self._models, self._keys, namespace, self._limits.body_timeout)
        if (listing := await endpoint.listing(held.request, held.request.match_info["path"])) is not None:
            return listing
        await endpoint.choose(held)
        return await self._proxy.serve(held)

    def _check(self, namespace: str, name: str = "any") -> None:
        """Raises Refusal for anything that is not the name of a resource, or of a namespace, that is served."""
        only = self._served.namespaces
        if not NAME.fullmatch(namespace) or not NAME.fullmatch(name) or (only and namespace not in only):
            words = f"this activator serves no MegatronInference at {namespace}/{name}"
            raise Refusal(words, HTTPStatus.NOT_FOUND, code="not_found")


def _path_behind(request: web.Request, segments: int) -> str:
    """Path and query behind the first segments of the path, as the client encoded them."""
    return "/" + request.raw_path.split("/", segments + 1)[segments + 1]


async def _alive(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")


async def serve(activator: Activator, host: str, port: int, stop: asyncio.Event, grace: float) -> None:
    """Serve until ``stop``; then hand new requests over to other activators, and finish the others.

    Connections are accepted for ``ENDPOINT_SECONDS`` more, and the answers tell clients to close them. Requests get
    ``grace`` seconds after ``LAST_IDLE_SECONDS``. Raises OSError when the port is taken.
    """
    runner = web.AppRunner(
        activator.application(),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=grace,
        lingering_time=LINGERING_SECONDS,
        # A compressed body is passed on as it is.
        auto_decompress=False,
    )
    await runner.setup()
    listening = None
    try:
        served = runner.server
        assert served is not None
        create = asyncio.get_running_loop().create_server
        listening = await create(lambda: activator.connections.protocol(served()), host, port, reuse_address=True)
        await stop.wait()
        activator.drain()
        await asyncio.sleep(ENDPOINT_SECONDS)
        listening.close()
        await asyncio.sleep(LAST_IDLE_SECONDS - ENDPOINT_SECONDS)
    finally:
        if listening is not None:
            listening.close()
        await runner.cleanup()
