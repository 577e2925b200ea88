"""The loop of a follower: a rank that executes the actions of its replica group's first rank."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_runtime.engine.worker.follower_actions import run_follower
from megatron_runtime.engine.worker.lock_step import Action
from megatron_runtime.engine.worker.weight_updates import require_idle
from megatron_runtime.errors import CheckpointError, EngineError
from megatron_runtime.headers import EngineState, Headers
from megatron_runtime.lifecycle import SIGNALS, ReachedStates, reached_states
from megatron_runtime.model.refit import READ_TIMEOUT, Weights
from megatron_runtime.notifier import Notifier

if TYPE_CHECKING:
    from megatron_runtime.engine.worker.protocol import RankEngine
    from megatron_runtime.parallel.ranks import Ranks

logger = logging.getLogger(__name__)


class FollowerLoop:
    """Has the interface of `EngineLoop`, which runs on the first rank.

    Args:
        engine: Used by this loop only while it runs.
        ranks: The replica group. Closed when the loop fails, so that the other ranks fail at once.
        prepare_thread: Called once in the thread that steps, for example to choose its CUDA device.
        on_state: Called on the event loop with every state that the engine reaches.
    """

    def __init__(
        self,
        engine: RankEngine,
        ranks: Ranks,
        *,
        prepare_thread: Callable[[], None] | None = None,
        on_state: Callable[[EngineState], None] | None = None,
    ) -> None:
        self._engine = engine
        self._ranks = ranks
        self._prepare_thread = prepare_thread
        self._on_state = on_state
        self._changed = Notifier()
        self._updates: deque[int | CheckpointError] = deque()
        self._given: queue.SimpleQueue[Weights] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.reached = ReachedStates()
        """The states that the engine has reached."""
        self.failure: BaseException | None = None
        """The error that ended the loop, if it failed."""
        self.ended = False

    async def run(self) -> None:
        """Run until the first rank releases this one.

        Raises:
            EngineError: A step failed, or other ranks are lost, late or out of step; the cause has the details.
        """
        self._loop = asyncio.get_running_loop()
        end: asyncio.Future[BaseException | None] = self._loop.create_future()
        # A daemon, since only the other ranks can end its wait.
        threading.Thread(target=self._run_follower, args=(end,), name="engine-step", daemon=True).start()
        try:
            self.failure = await end
            if self.failure is not None:
                logger.error("the engine loop of %s failed", self._ranks.position, exc_info=self.failure)
                self._ranks.close()
                raise EngineError(f"the engine loop failed: {self.failure!r}") from self.failure
        finally:
            self.ended = True
            self.reached.add(EngineState.STOPPED)
            self._announce(EngineState.STOPPED)

    @property
    def state(self) -> EngineState:
        """The state that was reached last."""
        return self.reached.present

    async def wait_until(self, *states: EngineState) -> EngineState:
        """As for EngineLoop."""
        while (found := self.reached.first_of(states)) is None:
            self._require_running()
            await self._changed.wait()
        return found

    async def update_weights(self, weights: Weights) -> int:
        """The result of the update that the first rank executes too; errors as for EngineLoop.

        Tensors are those given here; files are those given to the first rank.
        """
        if not self._updates:
            require_idle(self.state)
            self._given.put(weights)
        try:
            while not self._updates:
                self._require_running()
                require_idle(self.state)
                await self._changed.wait()
        finally:
            self._discard_given()
        outcome = self._updates.popleft()
        if isinstance(outcome, CheckpointError):
            raise outcome
        return outcome

    def _discard_given(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._given.get_nowait()

    def _require_running(self) -> None:
        if self.ended:
            raise EngineError(f"the engine loop has ended: {self.failure or 'it has stopped'}") from self.failure

    # In the thread

    def _run_follower(self, end: asyncio.Future[BaseException | None]) -> None:
        failure: BaseException | None = None
        try:
            if self._prepare_thread is not None:
                self._prepare_thread()
            run_follower(self._engine, self._ranks, self._note_action, self._own_weights)
        except BaseException as error:
            failure = error
        self._on_loop(lambda: None if end.done() else end.set_result(failure))

    def _own_weights(self) -> Weights:
        try:
            return self._given.get(timeout=READ_TIMEOUT)
        except queue.Empty:
            raise EngineError(
                f"{self._ranks.position}: update_weights was called with tensors on rank 0 of its replica group, but "
                f"not here within {READ_TIMEOUT:g} s; call it on every rank"
            ) from None

    def _note_action(self, action: str, args: list[Any], refusal: CheckpointError | None) -> None:
        if action == Action.UPDATE_WEIGHTS:
            self._updates.append(refusal or self._engine.weight_version)
            self._on_loop(self._changed.notify)
            return
        signal = SIGNALS.get(args[0] if action == Action.BARRIER else action)
        if signal is None:
            return
        if signal is Headers.PAUSE:
            self._updates.clear()
        for state in reached_states(signal):
            self._reach(state)

    def _reach(self, state: EngineState) -> None:
        self.reached.add(state)
        self._on_loop(lambda: self._announce(state))

    def _on_loop(self, act: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: there are no waiters
            self._loop.call_soon_threadsafe(act)

    # On the event loop

    def _announce(self, state: EngineState) -> None:
        if self._on_state is not None:
            self._on_state(state)
        self._changed.notify()
