"""Runs an activator against a cluster."""

from __future__ import annotations

import asyncio
import logging
import signal

from megatron_operator.activator.limits import Limits
from megatron_operator.activator.models import Models
from megatron_operator.activator.service import Activator, serve
from megatron_operator.kubernetes.api_server import ApiServer

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


async def activate(namespaces: tuple[str, ...], limits: Limits, host: str, port: int, drain_timeout: float) -> None:
    """Serve until SIGTERM or SIGINT, and then finish the requests within ``drain_timeout`` seconds.

    Raises AdapterError without a cluster, OSError when the port is taken.
    """
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    stop = asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, stop.set)
    api = await ApiServer.connect()
    try:
        await serve(Activator(Models(api), limits, namespaces), host, port, stop, drain_timeout)
    finally:
        await api.close()
