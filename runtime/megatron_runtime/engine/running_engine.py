"""Running an engine without explicit steps: as a task of an event loop, or for a coordinator."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_runtime.engine.profiler import StepProfiler
from megatron_runtime.engine.sampling.compiled_grammars import compiled_grammars
from megatron_runtime.engine.state_event import StateEvent
from megatron_runtime.errors import ConfigurationError, EngineError, InvalidStateError
from megatron_runtime.headers import EngineState
from megatron_runtime.inference_request import DynamicInferenceRequest, FinishedRequestRecord
from megatron_runtime.lifecycle import EVENTS
from megatron_runtime.parallel.rank_groups import RankGroups

if TYPE_CHECKING:
    from megatron_runtime.config import InferenceConfig
    from megatron_runtime.engine.engine_adapters import EngineAdapters
    from megatron_runtime.engine.worker.protocol import AttachedLoop, RankEngine
    from megatron_runtime.model.tokenizer import Tokenizer
    from megatron_runtime.parallel.ranks import Ranks
    from megatron_runtime.wire.items import AdapterEntry

_DIRECT_STATES = (EngineState.RUNNING, EngineState.SUSPENDED)


class RunningEngine(ABC):
    """Base class of an engine that runs as a task, or for a coordinator."""

    adapters: EngineAdapters
    """The LoRA adapters that requests can name."""
    config: InferenceConfig
    tokenizer: Tokenizer

    def __init__(self) -> None:
        self.is_suspended = False
        self.attached_loop: AttachedLoop | None = None
        """The loop that runs this engine for a coordinator, once it is attached."""
        self.engine_loop_task: asyncio.Task[None] | None = None
        """Runs ``attached_loop``, and ends when a client stops the engines; None without a coordinator."""
        self._state_events = {state: StateEvent(self, state) for state in EngineState if state in EVENTS}
        self._waiting: set[asyncio.Event] = set()
        self._profiler = StepProfiler()
        self.local_metadata_ledger_enabled = False
        """Whether requests of a coordinator are entered in the ledger when they finish."""
        self.local_metadata_ledger: dict[str, FinishedRequestRecord] = {}
        """Finished requests by ``uid``. The owner reads it, and replaces it by an empty one."""

    @property
    @abstractmethod
    def ranks(self) -> Ranks:
        """The ranks of the replica group."""

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
        """Wait until all earlier work is done."""

    def compile_grammar(self, grammar: str) -> Future[Any]:
        """Compile a grammar beside the steps, and keep it until `release_grammar` is called as often. A request that is
        added before its end waits for the rest of the work."""
        return compiled_grammars(self.tokenizer).compile(grammar)

    def release_grammar(self, grammar: str) -> None:
        """The request for which a grammar was compiled has tokens, or has ended."""
        compiled_grammars(self.tokenizer).release(grammar)

    @property
    def own_adapters(self) -> list[tuple[str, str]]:
        """Names and paths of the adapters that no coordinator has assigned."""
        return self.adapters.own

    def assign_adapters(self, entries: Sequence[AdapterEntry]) -> None:
        """As `EngineAdapters.assign`, for the loop of a coordinator."""
        self.adapters.assign(entries)

    def note_finished(self, request: DynamicInferenceRequest) -> None:
        """Enter a finished request of a coordinator in the ledger, if that is enabled."""
        if self.local_metadata_ledger_enabled and request.uid is not None and not request.failed():
            self.local_metadata_ledger[request.uid] = FinishedRequestRecord.from_request(request)

    def start_profiler(self) -> None:
        """Record a trace of the following steps; call it in their thread."""
        self._profiler.start()

    def stop_profiler(self) -> Path | None:
        """Write the trace, and return its path; None if none was recorded.

        Raises:
            OSError: The folder can't be written.
        """
        return self._profiler.stop()

    def attach(self, loop: AttachedLoop, task: asyncio.Task[None]) -> None:
        """Let this loop, which the task runs, run the engine for a coordinator from now on."""
        self.attached_loop = loop
        self.engine_loop_task = task

    @property
    def state(self) -> EngineState:
        """The state of the engine; without a coordinator it is either RUNNING or SUSPENDED."""
        if self.attached_loop is not None:
            return self.attached_loop.state
        return EngineState.SUSPENDED if self.is_suspended else EngineState.RUNNING

    def has_reached(self, state: EngineState) -> bool:
        """Whether ``wait_until`` would return at once: the state is the present one, or an event that is still set."""
        if self.attached_loop is not None:
            return self.attached_loop.reached.first_of((state,)) is state
        return self.state is state

    @property
    def running(self) -> StateEvent:
        """Set while the engine serves requests."""
        return self._state_events[EngineState.RUNNING]

    @property
    def paused(self) -> StateEvent:
        """Set from a pause until the engine serves requests again, also while it is suspended."""
        return self._state_events[EngineState.PAUSED]

    @property
    def stopped(self) -> StateEvent:
        """Set once the coordinator's loop has ended."""
        return self._state_events[EngineState.STOPPED]

    @property
    def pg_collection(self) -> RankGroups | Any:
        """The place of this rank in the groups of ranks that share the model, and among the replica groups; or the
        process groups of the configuration.
        """
        given = self.config.pg_collection
        return RankGroups.of(self.ranks.position) if given is None else given

    async def wait_until(self, state: EngineState) -> None:
        """Wait for a state, in the event loop that runs the engine.

        Raises:
            InvalidStateError: There is no coordinator, and the state exists only with a coordinator.
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
        """Serve added requests, as a task of the running event loop, until cancelled.

        The futures of ``add_request``, which has to be called in the thread of this event loop, have the results. A
        step blocks the event loop; other tasks run between steps. Without requests, or while the engine is suspended,
        the task waits.

        Raises:
            InvalidStateError: A coordinator's loop runs this engine.
            Exception: A step failed with it, and so did every unfinished request.
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

        The rank that starts the coordinator returns when the engines of all replica groups are registered.

        Args:
            inference_coordinator_port: Port of the coordinator; None lets a launched one choose.
            launch_inference_coordinator: Start a coordinator process; False connects to a running one.
            loop: The running event loop; not needed.
            hostname: Host of the coordinator; None: loopback for one rank, and MASTER_ADDR for several.
            key: The shared secret; None: MEGATRON_COORDINATOR_KEY, if it is set.
            coordinator_schedule_output_path: File for the routing decisions of a launched coordinator.

        Raises:
            ConfigurationError: The address or the key is invalid, or loop is not the running one.
            CoordinatorError: The coordinator did not start, or not all engines registered in time.
            EngineError: This rank's engine failed before all engines were registered.
        """
        # Imported here: an engine without a coordinator needs no messages.
        from megatron_runtime.engine.worker.attach import start_listening

        if loop is not None and loop is not asyncio.get_running_loop():
            raise ConfigurationError("loop is not the running event loop; omit it", field="loop")
        return await start_listening(
            self,
            port=inference_coordinator_port,
            launch_coordinator=launch_inference_coordinator,
            hostname=hostname,
            key=key,
            schedule_output_path=coordinator_schedule_output_path,
        )

    def _note_change(self) -> None:
        """Wake the tasks that wait for requests or for a state."""
        for event in self._waiting:
            event.set()

    async def _next_change(self) -> None:
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            await event.wait()
        finally:
            self._waiting.discard(event)
