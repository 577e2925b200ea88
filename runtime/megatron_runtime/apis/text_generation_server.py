"""The OpenAI frontends of an engine that the caller has attached to a coordinator itself; one group in a process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
from dataclasses import dataclass
from typing import Any

from megatron_runtime.apis.runtime_thread import RuntimeThread
from megatron_runtime.apis.serve_config import ServeConfig
from megatron_runtime.engine.worker.attach import engine_at
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.megatron import readable_tokenizer
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.frontend_group import FrontendGroup
from megatron_runtime.wire.key_files import find_key
from megatron_runtime.wire.security import coordinator_address

logger = logging.getLogger(__name__)

READY_SECONDS = 120.0


@dataclass(eq=False)
class _RunningServer:
    thread: RuntimeThread
    frontends: FrontendGroup
    tokenizer: Tokenizer
    """Kept, because its files may be temporary."""


_running: _RunningServer | None = None


def start_text_gen_server(
    coordinator_addr: str | int,
    tokenizer: Any,
    rank: int,
    server_port: int,
    parsers: list[str] | None = None,
    verbose: bool = False,
    num_replicas: int = 4,
    hostname: str | None = None,
    sock: socket.socket | None = None,
    *,
    max_sequence_length: int | None = None,
) -> None:
    """Start frontends for a coordinator, on one rank. The port accepts connections when this returns.

    Frontends that are running already stay, with a warning.

    Args:
        coordinator_addr: Address of the coordinator, or its port on this machine. `InferenceClient` says where its
            key is found.
        tokenizer: As for `from_megatron`.
        rank: Shown in the log.
        server_port: Port to listen on.
        parsers: As in ServeConfig; None: no parsers.
        verbose: As in ServeConfig.
        num_replicas: Number of frontend processes.
        hostname: Address to listen on; None: all of this machine.
        sock: As in ServeConfig.
        max_sequence_length: Most tokens of a prompt and its answer; None: that of this process's engine.

    Raises:
        ConfigurationError: An option is invalid, or max_sequence_length is missing.
    """
    global _running
    if _running is not None:
        logger.warning("rank %d: the text generation server is already running", rank)
        return
    config = ServeConfig(hostname or "0.0.0.0", server_port, parsers or [], verbose, num_replicas, sock)
    address = coordinator_address(coordinator_addr)
    limit = max_sequence_length or _limit_of_engine(address)
    readable = readable_tokenizer(tokenizer)
    options = config.frontend_options(address, readable, limit)
    frontends = FrontendGroup(options, config.listening_socket(), key=find_key(address))
    thread = RuntimeThread()
    thread.run(_start(frontends))
    thread.submit(frontends.wait_ready(READY_SECONDS)).add_done_callback(_log_failure)
    _running = _RunningServer(thread, frontends, readable)
    logger.info("rank %d: the text generation server listens on port %d", rank, frontends.port)


def stop_text_gen_server() -> None:
    """End the frontends; requests in flight are broken off. No effect if none are running."""
    global _running
    if _running is None:
        return
    server, _running = _running, None
    server.thread.run(server.frontends.stop())
    server.thread.stop()


async def run_flask_server(coordinator_port: str | int, tokenizer: Any, rank: int, flask_port: int) -> None:
    """Run frontends until the task is cancelled; arguments and errors as for `start_text_gen_server`."""
    start_text_gen_server(coordinator_port, tokenizer, rank, flask_port)
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.to_thread(stop_text_gen_server)


async def _start(frontends: FrontendGroup) -> None:
    frontends.start()


def _limit_of_engine(address: str) -> int:
    engine: Any = engine_at(address)
    if engine is None:
        raise ConfigurationError(
            f"max_sequence_length is missing: no engine of this process listens to the coordinator at {address}; give "
            "the max_sequence_length of the engines",
            field="max_sequence_length",
        )
    limit: int = engine.context.max_sequence_length
    return limit


def _log_failure(ready: concurrent.futures.Future[None]) -> None:
    if not ready.cancelled() and (error := ready.exception()) is not None:
        logger.error("the text generation server is not ready: %s", error)
