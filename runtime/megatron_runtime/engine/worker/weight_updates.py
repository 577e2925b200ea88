"""Weight updates of an engine that a loop runs: queued at any time, applied between steps."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_runtime.engine.worker.protocol import WeightEngine
from megatron_runtime.errors import EngineError, InvalidStateError
from megatron_runtime.headers import EngineState
from megatron_runtime.lifecycle import IDLE_STATES

if TYPE_CHECKING:
    from megatron_runtime.model.refit import Weights

InThread = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]


def require_idle(state: EngineState) -> None:
    """Raise InvalidStateError unless weights can be updated in this state."""
    if state not in IDLE_STATES:
        raise InvalidStateError(
            f"weights can't be updated while the engine is {state.value}; pause it first",
            state=state.value,
            allowed=["pause"] if state is EngineState.RUNNING else [],
        )


class WeightUpdateQueue:
    """The pending updates, in order.

    Args:
        engine: The engine that loads the weights.
        state: Returns the state of the engine.
    """

    def __init__(self, engine: WeightEngine, state: Callable[[], EngineState]) -> None:
        self._engine = engine
        self._state = state
        self._pending: deque[tuple[Weights, int | None, asyncio.Future[int]]] = deque()
        self._given: tuple[int, str] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def given_path(self) -> str:
        """Path of the engine's weights, if they were loaded by path and version; else empty."""
        return "" if self._given is None else self._given[1]

    def put(self, weights: Weights, version: int | None = None) -> asyncio.Future[int]:
        """Add an update. The future has the version, or the error of the engine, which then keeps its weights."""
        answer = asyncio.get_running_loop().create_future()
        self._pending.append((weights, version, answer))
        if self._closed:
            self.close()
        return answer

    async def apply_all(self, in_thread: InThread) -> None:
        """Apply the updates in the engine's thread. A failed update changes nothing; its caller gets the error."""
        while self._pending:
            weights, version, answer = self._pending.popleft()
            if version is not None and (version, weights) == self._given:
                answer.set_result(version)  # it was sent again because its answer was lost
                continue
            try:
                require_idle(self._state())
                updated = await in_thread(partial(self._engine.update_weights, weights, version=version))
            except Exception as error:
                if not answer.done():
                    answer.set_exception(error)
            else:
                self._given = (version, weights) if version is not None and isinstance(weights, str) else None
                if not answer.done():
                    answer.set_result(updated)

    def close(self) -> None:
        """Fail all pending and later updates; the loop has ended."""
        self._closed = True
        while self._pending:
            _, _, answer = self._pending.popleft()
            if not answer.done():
                answer.set_exception(EngineError("the engine loop has ended"))
