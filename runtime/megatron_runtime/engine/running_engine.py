"""The ways in which an engine runs by itself: as a task of an event loop, or for a coordinator."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from megatron_runtime.errors import ConfigurationError, EngineError, InvalidStateError
from megatron_runtime.headers import EngineState

if TYPE_CHECKING:
    from megatron_runtime.engine.worker.protocol import AttachedLoop, RankEngine

_DIRECT_STATES = (EngineState.RUNNING, EngineState.SUSPENDED)


class RunningEngine(ABC):
    """What an engine needs to be run without anybody who calls its steps."""

    def __init__(self) -> None:
        self.is_suspended = False
        self.attached_loop: AttachedLoop | None = None
        """Runs this engine for a coordinator, once it is attached to one."""
        self._waiting: set[asyncio.Event] = set()

    @abstractmethod
    def has_unfinished_requests(self) -> bool:
        """True if a step has something to compute or to report."""

    @abstractmethod
    async def async_step(self) -> Any:
        """Advance every running request by one pass."""

    @abstractmethod
    def fail_all_requests(self, error: Exception) -> None:
        """End every unfinished request with the error."""

    @abstractmethod
    def barrier(self, occasion: str) -> None:
        """Wait until everything that came before is done."""

    def attach(self, loop: AttachedLoop) -> None:
        """From now on this loop alone runs the engine, for a coordinator."""
        self.attached_loop = loop

    @property
    def state(self) -> EngineState:
        """Where the engine stands; without a coordinator it is either RUNNING or SUSPENDED."""
        if self.attached_loop is not None:
            return self.attached_loop.state
        return EngineState.SUSPENDED if self.is_suspended else EngineState.RUNNING

    async def wait_until(self, state: EngineState) -> None:
        """Wait for a state, in the event loop in which the engine runs.

        Raises:
            InvalidStateError: There is no coordinator, and only a coordinator brings an engine into that state.
            EngineError: The coordinator's loop ended in another state.
        """
        if self.attached_loop is not None:
            await self.attached_loop.wait_until(state)
            return
        if state not in _DIRECT_STATES:
            raise InvalidStateError(
                f"an engine without a coordinator is never {state.name}, only RUNNING or SUSPENDED",
                state=self.state.name,
            )
        while self.state is not state:
            await self._next_change()

    async def run_engine(self) -> None:
        """Serve what is added, as a task of the running event loop, until it is cancelled.

        Results come through the futures of ``add_request``, which has to be called in this event loop's thread. A
        step holds the event loop up for as long as it takes; other tasks run between steps. Without work, or while the
        engine is suspended, it sleeps.

        Raises:
            InvalidStateError: A coordinator's loop runs this engine.
            Exception: What made a step fail; every unfinished request has failed with it.
        """
        if self.attached_loop is not None:
            raise InvalidStateError("a coordinator's loop runs this engine already", state=self.state.name)
        while True:
            if self.is_suspended or not self.has_unfinished_requests():
                await self._next_change()
                continue
            try:
                await self.async_step()
            except Exception as error:
                self.fail_all_requests(EngineError(f"the engine failed: {error!r}"))
                raise

    async def start_listening_to_data_parallel_coordinator(
        self: RankEngine,
        inference_coordinator_port: int | None = None,
        launch_inference_coordinator: bool = True,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        hostname: str | None = None,
        key: str | None = None,
        coordinator_schedule_output_path: str | None = None,
    ) -> str:
        """Serve a coordinator's requests from a task of the running loop, and return the coordinator's address.

        Args:
            inference_coordinator_port: Of the coordinator; None lets a launched one choose.
            launch_inference_coordinator: Start a coordinator process, instead of joining one that runs.
            loop: The loop that runs in this thread; for callers that used to have to name it.
            hostname: Of the coordinator; None means loopback for one rank, and MASTER_ADDR for several.
            key: The shared secret; None takes MEGATRON_COORDINATOR_KEY, if there is one.
            coordinator_schedule_output_path: File for a launched coordinator's routing decisions.

        Raises:
            ConfigurationError: The address or the key can't work, or loop is not the running one.
            CoordinatorError: The coordinator did not start.
        """
        # Not above: messages know engines, and an engine without a coordinator needs no messages.
        from megatron_runtime.engine.worker.attach import start_listening

        if loop is not None and loop is not asyncio.get_running_loop():
            raise ConfigurationError("loop is not the one that runs here; leave it out", field="loop")
        return await start_listening(
            self,
            port=inference_coordinator_port,
            launch_coordinator=launch_inference_coordinator,
            hostname=hostname,
            key=key,
            schedule_output_path=coordinator_schedule_output_path,
        )

    def _note_change(self) -> None:
        """Wake whoever waits for work or for a state."""
        for event in self._waiting:
            event.set()

    async def _next_change(self) -> None:
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            await event.wait()
        finally:
            self._waiting.discard(event)
