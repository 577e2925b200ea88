"""The states of an engine as events, for callers that wait for them as Megatron's do."""

from __future__ import annotations

from typing import Literal, Protocol

from megatron_runtime.headers import EngineState


class _Engine(Protocol):
    def has_reached(self, state: EngineState) -> bool: ...
    async def wait_until(self, state: EngineState) -> None: ...


class StateEvent:
    """One state of an engine, with the methods of an asyncio.Event that read it.

    The event stays set after the engine has left the state, until the states of `lifecycle.CLEARED_EVENTS`.
    """

    def __init__(self, engine: _Engine, state: EngineState) -> None:
        self._engine = engine
        self._state = state

    def is_set(self) -> bool:
        """Whether the event is set."""
        return self._engine.has_reached(self._state)

    async def wait(self) -> Literal[True]:
        """Wait until the event is set; errors as for ``wait_until`` of the engine."""
        await self._engine.wait_until(self._state)
        return True
