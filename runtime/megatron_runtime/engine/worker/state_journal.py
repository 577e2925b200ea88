"""The states that an engine has reached, for callers that wait for a state late."""

from __future__ import annotations

from collections import deque

from megatron_runtime.headers import EngineState
from megatron_runtime.notifier import Notifier

_MAX_STATES = 64
"""Most states that are kept while there is no caller."""


class StateJournal:
    """Written by an engine's loop; read by a caller that waits for the same states in the same order.

    The caller that moves the engines, on another rank, may be several states ahead of the callers here.
    """

    def __init__(self) -> None:
        self._reached: deque[EngineState] = deque(maxlen=_MAX_STATES)
        self._changed = Notifier()

    def note(self, state: EngineState) -> None:
        """Append a state."""
        self._reached.append(state)
        self._changed.notify()

    async def next_of(self, *states: EngineState) -> EngineState:
        """The first of these states after the one that was returned last; waits for it."""
        while True:
            while self._reached:
                if (state := self._reached.popleft()) in states:
                    return state
            await self._changed.wait()
