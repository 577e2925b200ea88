"""One frontend process: ``python -m megatron_runtime.server.frontend``, started by a ``FrontendGroup``."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys

import uvloop

from megatron_runtime import tracing
from megatron_runtime.errors import ConfigurationError, MegatronInferenceError
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.model.tokenizer import load_tokenizer
from megatron_runtime.processes.parent_link import EXIT_BAD_INPUT, EXIT_DRAINED, EXIT_FAILURE, ParentLink
from megatron_runtime.processes.supervisor import error_report
from megatron_runtime.server.admission import AdmissionController
from megatron_runtime.server.api_keys import TOKEN_DIGEST_VARIABLE, ApiKeys
from megatron_runtime.server.app import create_app
from megatron_runtime.server.frontend_context import FrontendContext
from megatron_runtime.server.http_server import HttpServer
from megatron_runtime.server.options import FrontendOptions
from megatron_runtime.wire.security import KEY_VARIABLE

logger = logging.getLogger(__name__)

GARBAGE_OBJECTS = 20_000
"""Number of new objects that triggers a garbage collection; a request creates some hundreds."""
ENDPOINT_SECONDS = 2.0
"""Time for the nodes to learn that an ending pod left its Service: until then, clients still connect to it."""


def main() -> None:
    """Serves until SIGTERM; see ``_Drain`` for what the signal does."""
    link = ParentLink.from_arguments()
    sys.exit(uvloop.run(_serve(link)))


async def _serve(link: ParentLink) -> int:
    sock = socket.socket(fileno=link.options.pop("listen_fd"))
    options = FrontendOptions.deserialize(link.options)
    try:
        tracing.start()
        tokenizer = load_tokenizer(options.tokenizer_path)
        client = InferenceClient(options.coordinator_address, key=os.environ.get(KEY_VARIABLE))
    except MegatronInferenceError as error:
        link.report(error=error_report(error))
        logger.error("%s", error)
        return EXIT_BAD_INPUT
    try:
        api_keys = ApiKeys.of_frontend(options.api_keys_file, os.environ)
        certificate = options.http.certificate()
    except ConfigurationError as error:
        # FrontendGroup has read the files before, so this error may be transient: the process is restarted.
        logger.error("%s", error)
        return EXIT_FAILURE
    client.start()
    admission = AdmissionController(
        client,
        replica_group_wait=options.replica_group_wait,
        retry_after=options.retry_after,
        max_in_flight=options.http.max_in_flight,
    )
    token_digest = os.environ.get(TOKEN_DIGEST_VARIABLE)
    app = create_app(FrontendContext(options, client, tokenizer, admission, api_keys, token_digest))
    server = HttpServer(app, certificate=certificate)
    drain = _Drain(server, admission, link, hands_over=options.hands_over)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, drain.advance)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    background = [asyncio.create_task(link.keep_beating())]
    if certificate is not None:
        background.append(asyncio.create_task(certificate.follow()))
    try:
        await server.listening.wait()
        # Long-lived objects such as the tokenizer are excluded from garbage collection, and it runs rarely: requests
        # leave almost no reference cycles behind.
        gc.freeze()
        gc.set_threshold(GARBAGE_OBJECTS)
        link.report(phase="Serving")
        await serving
    finally:
        for task in background:
            task.cancel()
        client.stop()
    return EXIT_DRAINED


class _Drain:
    """The first SIGTERM rejects new requests and lets those in flight finish; the second aborts those and ends it.

    With ``hands_over`` the server rejects nothing: after ``ENDPOINT_SECONDS`` it closes its port, and tells clients to
    close their connections. They then connect to another endpoint.

    The parent gets the report of the phase ``Draining`` when the drain has begun: requests are rejected by then. Unless
    the server hands over, it gets ``Drained`` when those in flight have ended. A drained server still rejects requests
    until the second SIGTERM: an earlier end would reset connections that it accepts while another drains.
    """

    def __init__(
        self, server: HttpServer, admission: AdmissionController, link: ParentLink, *, hands_over: bool
    ) -> None:
        self._server = server
        self._admission = admission
        self._link = link
        self._hands_over = hands_over
        self._aborted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def advance(self) -> None:
        """Starts the drain, or aborts it when it is running."""
        if self._task is None:
            self._task = asyncio.create_task(self._drain())
        else:
            self._aborted.set()
            self._admission.abort()
            self._server.close_connections()

    async def _drain(self) -> None:
        if not self._hands_over:
            self._admission.refuse()
        self._link.report(phase="Draining")
        if self._hands_over:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._aborted.wait(), ENDPOINT_SECONDS)
            self._server.hand_over()
        await self._admission.drain()
        if not self._hands_over:
            self._link.report(phase="Drained")
            await self._aborted.wait()
        self._server.should_exit = True


if __name__ == "__main__":
    main()
