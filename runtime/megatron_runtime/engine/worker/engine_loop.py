"""The loop of an engine that works for a coordinator: inbox, signals, step, reports."""

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

from megatron_runtime.engine.worker.coordinator_connection import CoordinatorConnection
from megatron_runtime.engine.worker.loop_requests import LoopRequests
from megatron_runtime.engine.worker.protocol import Engine
from megatron_runtime.engine.worker.weight_updates import WeightUpdateQueue
from megatron_runtime.errors import EngineError
from megatron_runtime.headers import EngineState, Headers
from megatron_runtime.lifecycle import SOURCE_STATES, TRANSITIONAL_STATE, ReachedStates, reached_states
from megatron_runtime.notifier import Notifier
from megatron_runtime.wire.bodies import RequestBody
from megatron_runtime.wire.codec import MalformedMessage, Message
from megatron_runtime.wire.items import Assignment, EngineLoad, arguments, items, natural, text, uuid_bytes

if TYPE_CHECKING:
    from megatron_runtime.model.refit import Weights

logger = logging.getLogger(__name__)


class EngineLoop:
    """Runs one engine for a coordinator, from registration to the end.

    Each turn takes all messages that have arrived, then at most one control signal, then one step of the engine. The
    step runs in a thread of its own, so that heartbeats and the inbox go on during a long one. Without work the loop
    sleeps until a message comes. Results are kept until the coordinator confirms them; a lost connection or a restarted
    coordinator costs nothing but time, during which the engine works on.

    Args:
        engine: Nobody else may use it while the loop runs.
        coordinator_address: A port of this machine, ``host:port`` or ``tcp://host:port``.
        replica_group: The replica group that this engine serves.
        attempt: Which start of this group this is; a coordinator refuses an older one than it has seen.
        key: The coordinator's shared secret; None means plain sockets, allowed on loopback only.
        prepare_thread: Called once in the thread that steps, for instance to choose its CUDA device.
        on_state: Called with every state that is reached; RESUMED comes before PAUSED.

    Raises:
        ConfigurationError: Not an address, or a key is missing or too short.
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
        self._link = CoordinatorConnection(
            coordinator_address,
            replica_group=replica_group,
            attempt=attempt,
            key=key,
            describe=self._describe,
            on_message=self._hear,
            on_refused=self._refused,
        )
        self._thread = ThreadPoolExecutor(1, "engine-step", initializer=prepare_thread)
        self._on_state = on_state
        self._requests = LoopRequests(engine)
        self._inbox: deque[Message] = deque()
        self._signals: deque[Headers] = deque()
        self._weights = WeightUpdateQueue(engine, lambda: self.state)
        self._news = asyncio.Event()
        self._changed = Notifier()
        self._step_started: float | None = None
        self._draining = False
        self._leave_reason: str | None = None
        self._reached = ReachedStates()
        self.failure: BaseException | None = None
        """What ended the loop, if it failed."""
        self.ended = False

    async def run(self) -> None:
        """Work until the coordinator says STOP, or `drain` is done.

        Raises:
            EngineError: A step failed (with the failure as its cause), or the coordinator refused this engine. The
                coordinator has been told, and hands the requests to others.
        """
        self._link.open()
        try:
            await self._turns()
            if self.failure is not None:
                raise self.failure
        except asyncio.CancelledError:
            self._link.say_goodbye("its loop was cancelled", failed=False)
            raise
        except Exception as error:
            self._fail(error)
            if isinstance(error, EngineError):
                raise
            raise EngineError(f"the engine loop of replica group {self._replica_group} failed: {error!r}") from error
        finally:
            self._link.close()
            self._thread.shutdown(wait=False)
            self.ended = True
            self._weights.close()
            self._reach(EngineState.STOPPED)

    def drain(self, timeout: float) -> Coroutine[None, None, bool]:
        """Take nothing new, finish what there is, and leave; what is not done in time goes to other engines.

        Returns:
            True if everything was done in time.
        """
        self._draining = True
        self._link.tell_draining()
        return self._finish_and_leave(timeout)

    async def _finish_and_leave(self, limit: float) -> bool:
        drained = True
        try:
            async with asyncio.timeout(limit):
                # A paused engine makes no progress: its requests are better off elsewhere.
                while len(self._requests) and self.state is EngineState.RUNNING and not self.ended:
                    await self._changed.wait()
        except TimeoutError:
            drained = False
        drained = drained and not len(self._requests)
        self._leave("it was drained" if drained else "it was drained, and its time was up")
        while not self.ended:
            await self._changed.wait()
        return drained

    @property
    def state(self) -> EngineState:
        """The state that was reached last."""
        return self._reached.present

    @property
    def registered(self) -> asyncio.Event:
        """Set while the coordinator knows this engine."""
        return self._link.registered

    async def wait_until(self, *states: EngineState) -> EngineState:
        """Wait for one of these states; returns at once if it is the present one, or an event that is still set.

        Raises:
            EngineError: The loop ended in another state.
        """
        while (found := self._reached.first_of(states)) is None:
            if self.ended:
                raise EngineError(f"the engine loop has ended: {self.failure or 'it was stopped'}") from self.failure
            await self._changed.wait()
        return found

    async def update_weights(self, weights: Weights) -> int:
        """Give the engine other weights while it is paused or suspended; their version.

        Raises:
            InvalidStateError: It is neither.
            CheckpointError: They do not fit, or can't be read; the engine has its old ones.
            EngineError: The loop has ended.
        """
        answer = self._weights.put(weights)
        self._news.set()
        return await answer

    # The turns

    async def _turns(self) -> None:
        while self._leave_reason is None:
            self._news.clear()
            self._take_inbox()
            await self._weights.apply_all(self._in_thread)
            if self._signals and await self._apply(self._signals.popleft()):
                return
            self._report(*self._engine.take_reports())
            if self.state is EngineState.RUNNING and self._engine.has_unfinished_requests():
                await self._step()
            elif not self._signals and not self._inbox and not self._weights:
                await self._news.wait()
        self._link.say_goodbye(self._leave_reason, failed=False)

    async def _step(self) -> None:
        self._step_started = time.monotonic()
        try:
            result = await self._in_thread(self._engine.step_modern)
        finally:
            self._step_started = None
        self._report(result["finished_request_records"], result["partial_outputs"])

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _hear(self, message: Message) -> None:
        """Sort what arrives; nothing here touches the engine, which may be in a step."""
        match message.header:
            case Headers.SUBMIT_REQUEST | Headers.ABORT_REQUEST | Headers.REPLY_ACK:
                self._inbox.append(message)
            case Headers.PAUSE | Headers.UNPAUSE | Headers.SUSPEND | Headers.RESUME | Headers.STOP:
                self._signals.append(message.header)
            case Headers.UPDATE_WEIGHTS:
                version, path = arguments(message, 2)
                self._link.tell_weights(natural(version, "version"), self._weights.put(text(path, "path"), version))
            case _:
                raise MalformedMessage(f"{message.header.name} is not for engines")
        self._news.set()

    def _refused(self, reason: str) -> None:
        self.failure = EngineError(f"the coordinator refused this engine: {reason}")
        self._leave(reason)

    def _take_inbox(self) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            try:
                if message.header is Headers.SUBMIT_REQUEST:
                    for assignment, body in zip(items(message, Assignment.parse), message.bodies, strict=True):
                        self._take_request(assignment, body)
                else:
                    act = self._requests.abort if message.header is Headers.ABORT_REQUEST else self._requests.forget
                    for request_uuid in items(message, uuid_bytes, with_bodies=False):
                        act(request_uuid)
                    self._changed.notify()
            except MalformedMessage as defect:
                self._link.protocol_errors.add(f"from the coordinator: {defect}")

    def _take_request(self, assignment: Assignment, packed: bytes) -> None:
        try:
            request, told = self._requests.take(assignment, RequestBody.unpack(packed))
        except Exception as error:
            # Whatever is wrong with one request is its own answer, and nobody else's trouble. What the error says may
            # quote the request, and is for its client alone.
            logger.info("refused a request: %s", type(error).__name__)
            self._link.send_replies([self._requests.refuse(assignment, error)])
            return
        if request.reply is not None:
            self._link.send_replies([request])
        elif told < len(request.made.tokens):
            self._link.send_progress([(request, told, request.made.since(told))])

    # Signals

    async def _apply(self, signal: Headers) -> bool:
        """Carry out a signal; in a wrong state, say where the engine is instead. True if the loop is to end."""
        if self.state not in SOURCE_STATES[signal]:
            self._link.tell_state(self.state)
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

    async def _stop(self) -> None:
        """End every unfinished request as aborted."""
        self._reach(TRANSITIONAL_STATE[Headers.STOP])
        await self._in_thread(partial(self._engine.barrier, "stop"))
        for request in self._requests.unfinished():
            self._requests.abort(request.uuid)
        self._report(*self._engine.take_reports())
        self._link.tell_state(EngineState.STOPPED)

    def _reach(self, state: EngineState) -> None:
        self._reached.add(state)
        if state not in (EngineState.RESUMED, EngineState.STOPPED):
            self._link.tell_state(self.state)
        if self._on_state is not None:
            self._on_state(state)
        self._changed.notify()

    # Reports

    def _report(self, records: list[Any], partials: Mapping[int, Any]) -> None:
        news = [self._requests.progress(local_id, partial) for local_id, partial in partials.items()]
        finished = [self._requests.finish(record) for record in records]
        # A result has all tokens in it: the last few are not told twice.
        self._link.send_progress([item for item in news if item is not None and item[0].reply is None])
        self._link.send_replies([request for request in finished if request is not None])

    # Link and life

    def _describe(self) -> tuple[EngineState, bool, list[bytes], EngineLoad, str]:
        return self.state, self._draining, self._requests.uuids, self._load(), self._weights.given_path

    def _load(self) -> EngineLoad:
        stats = self._engine.stats()
        started = self._step_started
        return EngineLoad(
            stats.running,
            stats.waiting,
            stats.kv_blocks_total,
            stats.kv_blocks_used,
            stats.prompt_tokens_total,
            stats.generated_tokens_total,
            0.0 if started is None else time.monotonic() - started,
            stats.weight_version,
        )

    def _leave(self, reason: str) -> None:
        self._leave_reason = reason
        self._news.set()

    def _fail(self, error: BaseException) -> None:
        logger.error("the engine loop of replica group %d failed", self._replica_group, exc_info=error)
        self.failure = error
        self._link.say_goodbye(f"it failed: {error!r}"[:500], failed=True)
        with contextlib.suppress(Exception):
            self._engine.fail_all_requests(EngineError(f"the engine loop failed: {error!r}"))
