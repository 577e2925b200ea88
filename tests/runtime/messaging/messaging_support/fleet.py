"""A coordinator with engines and clients, in this process or in others."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from messaging_support.fake_engine import FakeEngine
from suite_support.worker import free_port

from megatron_runtime.data_parallel_inference_coordinator import DataParallelInferenceCoordinator
from megatron_runtime.data_parallel_inference_coordinator.options import CoordinatorOptions
from megatron_runtime.data_parallel_inference_coordinator.supervised_coordinator import SupervisedCoordinator
from megatron_runtime.engine.worker.engine_loop import EngineLoop
from megatron_runtime.inference_client import InferenceClient
from megatron_runtime.lifecycle import CoordinatorState
from megatron_runtime.processes.supervisor import RestartBudget
from megatron_runtime.wire.service_state import ServiceState

HERE = Path(__file__).parent


async def until(condition: Callable[[], Any], what: str, seconds: float = 20.0) -> None:
    """Wait for a condition with a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        await asyncio.sleep(0.01)


class Fleet:
    """A service on loopback addresses; leaving the block ends it."""

    def __init__(self, **options: Any) -> None:
        self.state = "RUNNING"
        self.options = {"data_parallel_size": 1, "engine_timeout": 2.0, **options}
        self.port = free_port()
        self.key: str | None = options.get("key")
        self.coordinator: DataParallelInferenceCoordinator | None = None
        self.loops: list[EngineLoop] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._clients: list[InferenceClient] = []
        self._thread: threading.Thread | None = None
        self._kept: list[SupervisedCoordinator] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self.address = f"tcp://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients:
            client.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.stop_coordinator)
        for process in self._processes:
            process.kill()
            await asyncio.to_thread(process.wait)
        for coordinator in self._kept:
            await coordinator.close()

    def start_coordinator(self, **changes: Any) -> DataParallelInferenceCoordinator:
        """Start it in a thread of this process."""
        self.coordinator = DataParallelInferenceCoordinator(
            None, inference_coordinator_port=self.port, **{**self.options, **changes}
        )
        self._thread = threading.Thread(target=self.coordinator.start, daemon=True)
        self._thread.start()
        return self.coordinator

    def stop_coordinator(self) -> None:
        """End it without a message to its peers."""
        if self.coordinator is not None and self._thread is not None:
            self.coordinator.stop()
            self._thread.join(10)
            assert not self._thread.is_alive()
            self.coordinator = None

    async def spawn_coordinator(self) -> SupervisedCoordinator:
        """Start it in a process that is not restarted, nor killed when it hangs."""
        coordinator = SupervisedCoordinator(
            CoordinatorOptions(inference_coordinator_port=self.port, **self.options),
            key=self.key,
            current_state=lambda: CoordinatorState[self.state],
            budget=RestartBudget(0),
            hang_timeout=math.inf,
        )
        self._kept.append(coordinator)
        coordinator.start()
        assert await coordinator.wait_serving(30) == self.address
        return coordinator

    def add_engine(self, engine: FakeEngine | None = None, *, group: int = 0, attempt: int = 0) -> EngineLoop:
        """Run an engine on the running event loop."""
        loop = EngineLoop(
            engine or FakeEngine(),
            coordinator_address=self.address,
            replica_group=group,
            attempt=attempt,
            key=self.key,
        )
        self.loops.append(loop)
        task = asyncio.create_task(loop.run())
        task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        self._tasks.append(task)
        return loop

    def spawn_engine(
        self, *, group: int, attempt: int = 0, step_seconds: float = 0.005, checkpoint: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Run an engine in a process that can be killed."""
        arguments = [self.address, str(group), str(attempt), str(step_seconds)]
        path = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        script = str(HERE / "engine_process.py")
        return self._spawn(
            [sys.executable, script, *arguments, *([str(checkpoint)] if checkpoint else [])], env=environment
        )

    def _spawn(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, **options)
        self._processes.append(process)
        return process

    async def connect(self, **options: Any) -> InferenceClient:
        """A connected client."""
        client = InferenceClient(self.address, key=self.key, **options)
        self._clients.append(client)
        await client.start()
        return client

    async def ready(self, client: InferenceClient, engines: int, seconds: float = 60.0) -> ServiceState:
        """Wait until this number of engines is ready."""
        deadline = time.monotonic() + seconds
        state = await client.service_state()
        while sum(view.ready for view in state.engines) != engines:
            assert time.monotonic() < deadline, f"{engines} engines were not ready within {seconds} s: {state}"
            with contextlib.suppress(TimeoutError):
                state = await client.wait_for_state_change(state.revision, 1.0)
        return state
