"""Uvicorn on sockets that are already bound, without uvicorn's signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn
from fastapi import FastAPI

from megatron_runtime.server.certificate import Certificate
from megatron_runtime.server.limited_protocol import ConnectionsState, LimitedProtocol

KEEP_ALIVE_SECONDS = 75


class HttpServer(uvicorn.Server):
    """Does not handle SIGTERM and SIGINT; set ``should_exit`` to stop it.

    Args:
        certificate: For HTTPS; None: plain HTTP.
    """

    server_state: ConnectionsState

    def __init__(
        self, app: FastAPI, *, graceful_seconds: int | None = None, certificate: Certificate | None = None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=LimitedProtocol,
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=graceful_seconds,
                lifespan="on",
                server_header=False,
            )
        )
        self.server_state = ConnectionsState()
        self._certificate = certificate
        self.listening = asyncio.Event()
        """Set once connections are accepted."""

    def hand_over(self) -> None:
        """Stop while other servers take over: clients are told to close their connections, see ``ConnectionsState``."""
        self.server_state.hands_over = True
        self.should_exit = True

    def close_connections(self) -> None:
        """End a handover: close idle connections, and others once their response is complete."""
        self.server_state.hands_over = False
        for connection in list(self.server_state.connections):
            connection.shutdown()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Returns once the server listens."""
        if self._certificate is not None:
            self.config.ssl = self._certificate.context
        await super().startup(sockets)
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End also connections that protocols get later. Returns when all have ended, or after ``graceful_seconds``."""
        self.server_state.is_shutting_down = True
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Captures no signals."""
        yield
