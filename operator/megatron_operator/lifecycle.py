"""The wish and the engine's state: which signal leads one legal step nearer."""

from __future__ import annotations

from megatron_operator.api.v1alpha1 import Lifecycle
from megatron_operator.world import EngineState, Signal

SETTLED_STATE = {
    Lifecycle.RUNNING: EngineState.RUNNING,
    Lifecycle.PAUSED: EngineState.PAUSED,
    Lifecycle.SUSPENDED: EngineState.SUSPENDED,
}
"""The engine's state in which a wish is fulfilled. Stopped has none: its pods are gone."""

_STEPS = {
    (Lifecycle.RUNNING, EngineState.PAUSED): Signal.UNPAUSE,
    (Lifecycle.RUNNING, EngineState.SUSPENDED): Signal.RESUME,
    (Lifecycle.PAUSED, EngineState.RUNNING): Signal.PAUSE,
    (Lifecycle.PAUSED, EngineState.SUSPENDED): Signal.RESUME,
    (Lifecycle.SUSPENDED, EngineState.RUNNING): Signal.PAUSE,
    (Lifecycle.SUSPENDED, EngineState.PAUSED): Signal.SUSPEND,
}

IN_BETWEEN = {
    EngineState.PAUSING: "Pausing",
    EngineState.UNPAUSING: "Unpausing",
    EngineState.SUSPENDING: "Suspending",
    EngineState.RESUMING: "Resuming",
    EngineState.STOPPING: "Stopping",
}
"""States that end by themselves, and their names as reasons."""


def next_signal(wish: Lifecycle, state: EngineState | None) -> Signal | None:
    """The one signal to send now; None when the wish is fulfilled, or the engine has to get somewhere first."""
    return None if state is None else _STEPS.get((wish, state))
