"""The loop of an engine that serves a coordinator's requests: inbox, signals, steps and reports."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_runtime.engine.worker.adapter_assignments import AdapterAssignments
from megatron_runtime.engine.worker.coordinator_connection import CoordinatorConnection
from megatron_runtime.engine.worker.inbox import Inbox
from megatron_runtime.engine.worker.loop_requests import LoopRequests
from megatron_runtime.engine.worker.protocol import Engine
from megatron_runtime.engine.worker.weight_updates import WeightUpdateQueue
from megatron_runtime.errors import EngineError
from megatron_runtime.headers import REQUEST_MESSAGES, EngineState, Headers
from megatron_runtime.lifecycle import BROADCASTS, SOURCE_STATES, TRANSITIONAL_STATE, ReachedStates, reached_states
from megatron_runtime.notifier import Notifier
from megatron_runtime.wire.codec import MalformedMessage, Message
from megatron_runtime.wire.items import AdapterReport, EngineLoad, arguments, natural, text

if TYPE_CHECKING:
    from megatron_runtime.model.refit import Weights

logger = logging.getLogger(__name__)


class EngineLoop:
    """Runs one engine for a coordinator, from registration to the end.

    Each iteration handles received messages, then at most one control signal, then one step of the engine. The step
    runs in a separate thread, so that a long step delays neither heartbeats nor the inbox. Without work the loop waits
    for a message. The engine keeps results until the coordinator acknowledges them: when the connection is lost or the
    coordinator restarts, no result is lost and the engine goes on.

    Args:
        engine: Used by this loop only while it runs.
        coordinator_address: A port of this machine, ``host:port`` or ``tcp://host:port``.
        replica_group: The replica group that this engine serves.
        attempt: Number of this start of the replica group; the coordinator refuses older attempts than the newest one.
        key: The coordinator's shared secret; None means plain sockets, allowed on loopback only.
        prepare_thread: Called once in the thread that steps, for example to choose its CUDA device.
        on_state: Called with every state that the engine reaches; RESUMED precedes PAUSED.

    Raises:
        ConfigurationError: The address is invalid, or a key is missing or too short.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        coordinator_address: int | str,
        replica_group: int = 0,
        attempt: int = 0,
        key: str | None = None,
        prepare_thread: Callable[[], None] | None = None,
        on_state: Callable[[EngineState], None] | None = None,
    ) -> None:
        self._engine = engine
        self._replica_group = replica_group
        self._connection = CoordinatorConnection(
            coordinator_address,
            replica_group=replica_group,
            attempt=attempt,
            key=key,
            describe=self._describe,
            on_message=self._receive,
            on_registering=lambda: self._inbox.forget_withheld(),
            on_refused=self._refused,
        )
        self._thread = ThreadPoolExecutor(1, "engine-step", initializer=prepare_thread)
        self._on_state = on_state
        self._requests = LoopRequests(engine, self._wake_from_thread)
        self._adapters = AdapterAssignments(engine, self._in_thread, self._connection.report_adapters)
        self._inbox = Inbox(
            engine,
            self._requests,
            self._connection,
            self._adapters,
            in_thread=self._in_thread,
            on_change=lambda: self._changed.notify(),
        )
        self._signals: deque[Headers] = deque()
        self._weights = WeightUpdateQueue(engine, lambda: self.state)
        self._wake = asyncio.Event()
        self._changed = Notifier()
        self._step_started: float | None = None
        self._draining = False
        self._leave_reason: str | None = None
        self.reached = ReachedStates()
        """The states that the engine has reached."""
        self.failure: BaseException | None = None
        """The error that ended the loop, if it failed."""
        self.ended = False

    async def run(self) -> None:
        """Run until the coordinator sends STOP, or `drain` is done.

        Raises:
            EngineError: A step failed (the error is the cause), or the coordinator refused this engine. The engine is
                deregistered, and the coordinator assigns its requests to others.
        """
        self._event_loop = asyncio.get_running_loop()
        self._connection.open()
        try:
            await self._iterate()
            if self.failure is not None:
                raise self.failure
        except asyncio.CancelledError:
            self._connection.send_disconnect("its loop was cancelled", failed=False)
            raise
        except Exception as error:
            self._fail(error)
            if isinstance(error, EngineError):
                raise
            raise EngineError(f"the engine loop of replica group {self._replica_group} failed: {error!r}") from error
        finally:
            self._connection.close()
            self._thread.shutdown(wait=False)
            self.ended = True
            self._weights.close()
            self._reach(EngineState.STOPPED)

    def drain(self, timeout: float) -> Coroutine[None, None, bool]:
        """Accept no new requests, finish the present ones, and end; unfinished requests go to other engines.

        Returns:
            True if all requests were finished in time.
        """
        self._draining = True
        self._connection.report_draining()
        return self._finish_and_leave(timeout)

    async def _finish_and_leave(self, limit: float) -> bool:
        drained = True
        try:
            async with asyncio.timeout(limit):
                # A paused engine makes no progress: other engines serve its requests earlier.
                while len(self._requests) and self.state is EngineState.RUNNING and not self.ended:
                    await self._changed.wait()
        except TimeoutError:
            drained = False
        drained = drained and not len(self._requests)
        self._leave("it was drained" if drained else "its drain timed out")
        while not self.ended:
            await self._changed.wait()
        return drained

    @property
    def state(self) -> EngineState:
        """The state that was reached last."""
        return self.reached.present

    @property
    def registered(self) -> asyncio.Event:
        """Set while the engine is registered."""
        return self._connection.registered

    async def wait_until(self, *states: EngineState) -> EngineState:
        """Wait for one of these states; returns at once if it is the present one, or an event that is still set.

        Raises:
            EngineError: The loop ended in another state.
        """
        while (found := self.reached.first_of(states)) is None:
            if self.ended:
                raise EngineError(f"the engine loop has ended: {self.failure or 'it has stopped'}") from self.failure
            await self._changed.wait()
        return found

    async def update_weights(self, weights: Weights) -> int:
        """Load other weights into the paused or suspended engine, and return their version.

        Raises:
            InvalidStateError: The engine is neither paused nor suspended.
            CheckpointError: The weights don't fit or can't be read; the engine keeps its weights.
            EngineError: The loop has ended.
        """
        answer = self._weights.put(weights)
        self._wake.set()
        return await answer

    # Iterations

    async def _iterate(self) -> None:
        while self._leave_reason is None:
            self._wake.clear()
            await self._inbox.take_turn()
            await self._weights.apply_all(self._in_thread)
            if self._signals and await self._apply(self._signals.popleft()):
                return
            self._report(*self._engine.pop_reports())
            if self.state is EngineState.RUNNING and self._engine.has_unfinished_requests():
                await self._step()
            elif not self._signals and not self._inbox and not self._weights:
                await self._wake.wait()
        self._connection.send_disconnect(self._leave_reason, failed=False)

    async def _step(self) -> None:
        self._step_started = time.monotonic()
        try:
            result = await self._in_thread(self._engine.step_modern)
        finally:
            self._step_started = None
        self._report(result["finished_request_records"], result["partial_outputs"])

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _wake_from_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # The event loop is closed.
            self._event_loop.call_soon_threadsafe(self._wake.set)

    def _receive(self, message: Message) -> None:
        """Queue a message. This must not use the engine, which may be in a step."""
        match message.header:
            case header if header in REQUEST_MESSAGES:
                self._inbox.put(message)
            case header if header in SOURCE_STATES or header in BROADCASTS:
                self._signals.append(message.header)
            case Headers.UPDATE_WEIGHTS:
                version, path = arguments(message, 2)
                self._connection.report_weights(
                    natural(version, "version"), self._weights.put(text(path, "path"), version)
                )
            case _:
                raise MalformedMessage(f"{message.header.name} is not for engines")
        self._wake.set()

    def _refused(self, reason: str) -> None:
        self.failure = EngineError(f"the coordinator refused this engine: {reason}")
        self._leave(reason)

    # Signals

    async def _apply(self, signal: Headers) -> bool:
        """Carry out a signal, or report the state if it does not allow the signal. True if the loop ends."""
        if signal in BROADCASTS:
            await self._profile(signal)
            return False
        if self.state not in SOURCE_STATES[signal]:
            self._connection.report_state(self.state)
            return False
        match signal:
            case Headers.PAUSE | Headers.UNPAUSE:
                await self._in_thread(partial(self._engine.barrier, signal.name.lower()))
            case Headers.SUSPEND:
                self._reach(TRANSITIONAL_STATE[signal])
                await self._in_thread(self._engine.suspend)
            case Headers.RESUME:
                self._reach(TRANSITIONAL_STATE[signal])
                await self._in_thread(self._engine.resume)
            case Headers.STOP:
                await self._stop()
                return True
        for state in reached_states(signal):
            self._reach(state)
        return False

    async def _profile(self, signal: Headers) -> None:
        is_start = signal is Headers.START_CUDA_PROFILER
        try:
            await self._in_thread(self._engine.start_profiler if is_start else self._engine.stop_profiler)
        except OSError as error:
            logger.warning("the trace can't be written: %s", error)

    async def _stop(self) -> None:
        """End every unfinished request as aborted."""
        self._reach(TRANSITIONAL_STATE[Headers.STOP])
        await self._in_thread(partial(self._engine.barrier, "stop"))
        for request in self._requests.unfinished():
            self._requests.abort(request.uuid)
        self._report(*self._engine.pop_reports())
        self._connection.report_state(EngineState.STOPPED)

    def _reach(self, state: EngineState) -> None:
        self.reached.add(state)
        if state not in (EngineState.RESUMED, EngineState.STOPPED):
            self._connection.report_state(self.state)
        if self._on_state is not None:
            self._on_state(state)
        self._changed.notify()

    # Reports

    def _report(self, records: list[Any], partials: Mapping[int, Any]) -> None:
        chunks = [self._requests.progress(local_id, partial) for local_id, partial in partials.items()]
        finished = [self._requests.finish(record) for record in records]
        # A result has all tokens: the last ones are not sent twice.
        self._connection.send_progress([item for item in chunks if item is not None and item[0].reply is None])
        self._connection.send_replies([request for request in finished if request is not None])

    # Registration and end

    def _describe(self) -> tuple[EngineState, bool, list[bytes], EngineLoad, str, AdapterReport]:
        requests, load = self._requests.uuids, self._load()
        return self.state, self._draining, requests, load, self._weights.given_path, self._adapters.describe()

    def _load(self) -> EngineLoad:
        stats = self._engine.stats()
        started = self._step_started
        return EngineLoad(
            stats.running,
            stats.waiting + self._requests.compiling,
            stats.kv_blocks_total,
            stats.kv_blocks_used,
            stats.prompt_tokens_total,
            stats.generated_tokens_total,
            0.0 if started is None else time.monotonic() - started,
            stats.weight_version,
            stats.draft_tokens_total,
            stats.accepted_draft_tokens_total,
        )

    def _leave(self, reason: str) -> None:
        self._leave_reason = reason
        self._wake.set()

    def _fail(self, error: BaseException) -> None:
        logger.error("the engine loop of replica group %d failed", self._replica_group, exc_info=error)
        self.failure = error
        self._connection.send_disconnect(f"it failed: {error!r}"[:500], failed=True)
        with contextlib.suppress(Exception):
            self._engine.fail_all_requests(EngineError(f"the engine loop failed: {error!r}"))
