"""The states that an engine reached, for those who come late to wait for one."""

from __future__ import annotations

from collections import deque

from megatron_runtime.headers import EngineState
from megatron_runtime.notifier import Notifier

_KEPT = 64
"""States that are remembered for somebody who asks for none."""


class StateJournal:
    """Written by an engine's loop; read by one who goes the same way, maybe later.

    Whoever moves an engine through its states on another rank may be several states ahead of those who wait for each of
    them here.
    """

    def __init__(self) -> None:
        self._reached: deque[EngineState] = deque(maxlen=_KEPT)
        self._changed = Notifier()

    def note(self, state: EngineState) -> None:
        """A state was reached."""
        self._reached.append(state)
        self._changed.notify()

    async def next_of(self, *states: EngineState) -> EngineState:
        """Which of these was reached first since the one that was asked for last; waits for it."""
        while True:
            while self._reached:
                if (state := self._reached.popleft()) in states:
                    return state
            await self._changed.wait()
