"""The states of the service, the edges between them, and which signal takes an engine one step nearer."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from megatron_runtime.headers import EngineState, Headers


class CoordinatorState(Enum):
    """Where the service stands, or where it is on its way to."""

    RUNNING = auto()
    PAUSED = auto()
    SUSPENDED = auto()
    STOPPING = auto()


EDGES: Mapping[CoordinatorState, Mapping[Headers, CoordinatorState]] = {
    CoordinatorState.RUNNING: {Headers.PAUSE: CoordinatorState.PAUSED},
    CoordinatorState.PAUSED: {
        Headers.UNPAUSE: CoordinatorState.RUNNING,
        Headers.SUSPEND: CoordinatorState.SUSPENDED,
        Headers.STOP: CoordinatorState.STOPPING,
    },
    CoordinatorState.SUSPENDED: {
        Headers.RESUME: CoordinatorState.PAUSED,
        Headers.STOP: CoordinatorState.STOPPING,
    },
    CoordinatorState.STOPPING: {},
}

ALREADY_THERE: Mapping[Headers, frozenset[CoordinatorState]] = {
    Headers.PAUSE: frozenset({CoordinatorState.PAUSED, CoordinatorState.SUSPENDED}),
}
"""States in which a signal's wish is met already: answered as done, not refused, as Megatron does."""

ENGINE_STATE: Mapping[CoordinatorState, EngineState] = {
    CoordinatorState.RUNNING: EngineState.RUNNING,
    CoordinatorState.PAUSED: EngineState.PAUSED,
    CoordinatorState.SUSPENDED: EngineState.SUSPENDED,
    CoordinatorState.STOPPING: EngineState.STOPPED,
}
"""The state that every engine has once the service has arrived."""

IN_BETWEEN: Mapping[Headers, EngineState] = {
    Headers.PAUSE: EngineState.PAUSING,
    Headers.UNPAUSE: EngineState.UNPAUSING,
    Headers.SUSPEND: EngineState.SUSPENDING,
    Headers.RESUME: EngineState.RESUMING,
    Headers.STOP: EngineState.STOPPING,
}
"""What the service is called while a signal is on its way through the engines."""

SIGNALS = tuple(IN_BETWEEN)

SETTLED: Mapping[EngineState, CoordinatorState] = {ENGINE_STATE[state]: state for state in CoordinatorState} | {
    IN_BETWEEN[signal]: wish for edges in EDGES.values() for signal, wish in edges.items()
}
"""Where engines in a state are, or are on their way to."""

_TOWARDS: Mapping[tuple[EngineState, CoordinatorState], Headers] = {
    (EngineState.RUNNING, CoordinatorState.PAUSED): Headers.PAUSE,
    (EngineState.RUNNING, CoordinatorState.SUSPENDED): Headers.PAUSE,
    (EngineState.RUNNING, CoordinatorState.STOPPING): Headers.PAUSE,
    (EngineState.PAUSED, CoordinatorState.RUNNING): Headers.UNPAUSE,
    (EngineState.PAUSED, CoordinatorState.SUSPENDED): Headers.SUSPEND,
    (EngineState.PAUSED, CoordinatorState.STOPPING): Headers.STOP,
    (EngineState.SUSPENDED, CoordinatorState.RUNNING): Headers.RESUME,
    (EngineState.SUSPENDED, CoordinatorState.PAUSED): Headers.RESUME,
    (EngineState.SUSPENDED, CoordinatorState.STOPPING): Headers.STOP,
}


def next_signal(engine: EngineState, wish: CoordinatorState) -> Headers | None:
    """The signal for the next edge from here to there; None when it is there, or on its way between two states."""
    return _TOWARDS.get((engine, wish))
