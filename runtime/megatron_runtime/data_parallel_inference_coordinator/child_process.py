"""A coordinator as a child of this process, started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

from megatron_runtime.errors import CoordinatorError

logger = logging.getLogger(__name__)

_MODULE = "megatron_runtime.data_parallel_inference_coordinator"
START_SECONDS = 30.0
STOP_SECONDS = 5.0
MOST_RESTARTS = 10


class CoordinatorChild:
    """Lives on one event loop, and ends with this process at the latest.

    Args:
        options: Arguments of DataParallelInferenceCoordinator by name, as JSON values.
        current_state: The name of the state of the service, for a coordinator that replaces one that died.
    """

    def __init__(self, options: dict[str, Any], current_state: Callable[[], str]) -> None:
        self._options = options
        self._current_state = current_state
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.address = ""
        """Where peers connect to, once started."""

    @property
    def pid(self) -> int | None:
        """The process as it is now."""
        return None if self._process is None else self._process.pid

    async def start(self) -> str:
        """Start it, and keep it running.

        Returns:
            Its address.

        Raises:
            CoordinatorError: It ended, or did not say its address in time; what it wrote is in this process's stderr.
        """
        self.address = await self._spawn()
        self._options["inference_coordinator_port"] = int(self.address.rpartition(":")[2])
        self._keeper = asyncio.create_task(self._keep())
        return self.address

    async def stop(self) -> None:
        """End it: at once if it does not end by itself."""
        if self._keeper is not None:
            self._keeper.cancel()
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _spawn(self) -> str:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _MODULE), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(self._options).encode() + b"\n")
            async with asyncio.timeout(START_SECONDS):
                line = await self._process.stdout.readline()
        except (TimeoutError, ConnectionError):
            line = b""
        if not line:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            code = await self._process.wait()
            raise CoordinatorError(f"the coordinator did not start (exit code {code}); it said why on stderr")
        return line.decode().strip()

    async def _keep(self) -> None:
        for _ in range(MOST_RESTARTS):
            assert self._process is not None
            code = await self._process.wait()
            if code == 0:
                return  # a client sent SHUTDOWN
            logger.warning("the coordinator ended with code %d; starting it again", code)
            self._options["initial_state"] = self._current_state()
            try:
                address = await self._spawn()
            except CoordinatorError:
                logger.exception("the coordinator could not be started again")
                continue
            if address != self.address:
                logger.error("the coordinator came back at %s instead of %s", address, self.address)
        logger.error("the coordinator ended too often (%d times); it stays away", MOST_RESTARTS)
