"""New weights for an engine that a loop runs: wanted at any time, taken up between steps."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_runtime.engine.worker.protocol import WeightTaker
from megatron_runtime.errors import EngineError, InvalidStateError
from megatron_runtime.headers import EngineState
from megatron_runtime.lifecycle import IDLE_STATES

if TYPE_CHECKING:
    from megatron_runtime.model.refit import Weights

InThread = Callable[[Callable[[], Any]], Coroutine[Any, Any, Any]]


def require_idle(state: EngineState) -> None:
    """Raise InvalidStateError unless an engine in this state may be given other weights."""
    if state not in IDLE_STATES:
        raise InvalidStateError(
            f"weights can't be updated while the engine is {state.value}; pause it first",
            state=state.value,
            allowed=["pause"] if state is EngineState.RUNNING else [],
        )


class WeightUpdateQueue:
    """The updates that are wanted, in their order.

    Args:
        engine: Takes them.
        state: Where it stands.
    """

    def __init__(self, engine: WeightTaker, state: Callable[[], EngineState]) -> None:
        self._engine = engine
        self._state = state
        self._wanted: deque[tuple[Weights, int | None, asyncio.Future[int]]] = deque()
        self._given: tuple[int, str] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._wanted)

    @property
    def given_path(self) -> str:
        """Where the weights come from that the engine has; empty unless they were given by path and version."""
        return "" if self._given is None else self._given[1]

    def put(self, weights: Weights, version: int | None = None) -> asyncio.Future[int]:
        """Want an update; the future brings the version, or what the engine said, and then it has its old weights."""
        answer = asyncio.get_running_loop().create_future()
        self._wanted.append((weights, version, answer))
        if self._closed:
            self.close()
        return answer

    async def apply_all(self, in_thread: InThread) -> None:
        """Carry them out in the engine's thread. What fails is its caller's concern, since it changes nothing."""
        while self._wanted:
            weights, version, answer = self._wanted.popleft()
            if version is not None and (version, weights) == self._given:
                answer.set_result(version)  # it was sent again, because its answer was lost
                continue
            try:
                require_idle(self._state())
                made = await in_thread(partial(self._engine.update_weights, weights, version=version))
            except Exception as error:
                if not answer.done():
                    answer.set_exception(error)
            else:
                self._given = (version, weights) if version is not None and isinstance(weights, str) else None
                if not answer.done():
                    answer.set_result(made)

    def close(self) -> None:
        """The loop has ended: nothing more is carried out."""
        self._closed = True
        while self._wanted:
            _, _, answer = self._wanted.popleft()
            if not answer.done():
                answer.set_exception(EngineError("the engine loop has ended"))
