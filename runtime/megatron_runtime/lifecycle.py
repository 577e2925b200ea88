"""The lifecycle of the service: its states, and the signals that move it from one to another.

EDGES lists them; every other table of states and signals in the runtime derives from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum, auto

from megatron_runtime.headers import EngineState, Headers


class CoordinatorState(Enum):
    """The state of the service, or the target of the transition in progress."""

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
"""State, signal, and the state that the signal leads to."""

ALREADY_DONE: Mapping[Headers, frozenset[CoordinatorState]] = {
    Headers.PAUSE: frozenset({CoordinatorState.PAUSED, CoordinatorState.SUSPENDED}),
}
"""States in which the coordinator answers a signal as done instead of refusing it, as Megatron does."""

AFTER_STOP = CoordinatorState.RUNNING
"""The state of the service once all engines have stopped: engines that register later serve requests."""

SETTLED_STATE: Mapping[CoordinatorState, EngineState] = {
    CoordinatorState.RUNNING: EngineState.RUNNING,
    CoordinatorState.PAUSED: EngineState.PAUSED,
    CoordinatorState.SUSPENDED: EngineState.SUSPENDED,
    CoordinatorState.STOPPING: EngineState.STOPPED,
}
"""The state of every engine once the service has reached a state."""

TRANSITIONAL_STATE: Mapping[Headers, EngineState] = {
    Headers.PAUSE: EngineState.PAUSING,
    Headers.UNPAUSE: EngineState.UNPAUSING,
    Headers.SUSPEND: EngineState.SUSPENDING,
    Headers.RESUME: EngineState.RESUMING,
    Headers.STOP: EngineState.STOPPING,
}
"""The state that the service reports while the engines carry out a signal."""

SIGNALS: Mapping[str, Headers] = {signal.name.lower(): signal for signal in TRANSITIONAL_STATE}
"""The signals by their names in the control API and in messages."""

BROADCASTS = frozenset(
    {
        Headers.SET_GENERATION_EPOCH,
        Headers.INCREMENT_STALENESS,
        Headers.RESET_PREFIX_CACHE,
        Headers.START_CUDA_PROFILER,
        Headers.STOP_CUDA_PROFILER,
    }
)
"""Messages of clients that the coordinator passes on to all engines, in any state."""

_TARGET: Mapping[Headers, CoordinatorState] = {
    signal: target for edges in EDGES.values() for signal, target in edges.items()
}

TARGET_OF_STATE: Mapping[EngineState, CoordinatorState] = {
    SETTLED_STATE[state]: state for state in CoordinatorState
} | {TRANSITIONAL_STATE[signal]: target for signal, target in _TARGET.items()}
"""The state that engines in a state are in, or move to."""

STATE_AFTER: Mapping[Headers, CoordinatorState] = {
    signal: AFTER_STOP if target is CoordinatorState.STOPPING else target for signal, target in _TARGET.items()
}
"""The state of the service once every engine has carried out a signal."""

SOURCE_STATES: Mapping[Headers, frozenset[EngineState]] = {
    signal: frozenset(SETTLED_STATE[source] for source, edges in EDGES.items() if signal in edges) for signal in _TARGET
}
"""The states in which an engine carries out a signal."""

EVENTS = frozenset(SETTLED_STATE.values()) | {EngineState.RESUMED}
"""The states that stay set as events after the engine has left them."""

CLEARED_EVENTS: Mapping[EngineState, frozenset[EngineState]] = {
    EngineState.PAUSED: frozenset({EngineState.RUNNING}),
    EngineState.RUNNING: frozenset({EngineState.PAUSED}),
    EngineState.SUSPENDING: frozenset({EngineState.RESUMED}),
    EngineState.RESUMING: frozenset({EngineState.SUSPENDED}),
}
"""The events that an engine clears when it reaches a state. As in Megatron, PAUSED stays set through a suspension and
its end, and RESUMED until the next suspension begins."""

IDLE_STATES = SOURCE_STATES[Headers.STOP]
"""The states in which engines keep their requests and compute nothing: they can stop, or load other weights."""


def reached_states(signal: Headers) -> tuple[EngineState, ...]:
    """The states that an engine passes, in order, when it has carried out a signal; the last one lasts.

    An engine that stops is STOPPING until its loop has ended.
    """
    if signal is Headers.STOP:
        return (TRANSITIONAL_STATE[signal],)
    settled = SETTLED_STATE[_TARGET[signal]]
    return (EngineState.RESUMED, settled) if signal is Headers.RESUME else (settled,)


class ReachedStates:
    """The states that `wait_until` of an engine accepts: the present one, and the events that are still set."""

    def __init__(self) -> None:
        self.present = EngineState.RUNNING
        self._events = frozenset({EngineState.RUNNING})

    def add(self, state: EngineState) -> None:
        """Record a state. Another thread may call ``first_of`` at the same time."""
        self._events = (self._events - CLEARED_EVENTS.get(state, frozenset())) | {state} & EVENTS
        self.present = state

    def first_of(self, states: Iterable[EngineState]) -> EngineState | None:
        """The first of these states that is the present one or an event that is set."""
        return next((state for state in states if state is self.present or state in self._events), None)


def steps_to(state: CoordinatorState, signal: Headers) -> tuple[Headers, ...]:
    """The signals that a client's signal needs in a state: itself, or PAUSE before it; empty if it is not possible.

    A running service that is suspended or stopped is paused first.
    """
    if signal in EDGES[state]:
        return (signal,)
    paused = EDGES[state].get(Headers.PAUSE)
    is_path = paused is not None and EDGES[paused].get(signal, state) is not state
    return (Headers.PAUSE, signal) if is_path else ()


def _first_signals(start: CoordinatorState) -> dict[CoordinatorState, Headers]:
    """The first signal of the shortest path to every other state, by breadth-first search."""
    first: dict[CoordinatorState, Headers] = {}
    frontier = deque((target, signal) for signal, target in EDGES[start].items())
    while frontier:
        state, signal = frontier.popleft()
        if state is start or state in first:
            continue
        first[state] = signal
        frontier.extend((target, signal) for target in EDGES[state].values())
    return first


_NEXT_SIGNALS = {SETTLED_STATE[start]: _first_signals(start) for start in EDGES}


def next_signal(engine: EngineState, target: CoordinatorState) -> Headers | None:
    """The signal for the next edge from an engine's state to the target; None in the target and during a transition."""
    return _NEXT_SIGNALS.get(engine, {}).get(target)
