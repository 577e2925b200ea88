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

TRANSITION_REASONS = {
    EngineState.PAUSING: "Pausing",
    EngineState.UNPAUSING: "Unpausing",
    EngineState.SUSPENDING: "Suspending",
    EngineState.RESUMING: "Resuming",
    EngineState.STOPPING: "Stopping",
}
"""States that end by themselves, and their names as reasons."""


def next_signal(desired: Lifecycle, state: EngineState | None, *, auto_suspended: bool = False) -> Signal | None:
    """The one signal to send now; None when the wish is fulfilled, or the engine has to get somewhere first.

    An engine that sleeps for want of requests runs as far as the wish is concerned. One that shall be suspended is told
    so although it is: then no request wakes it any more.
    """
    if auto_suspended and desired is Lifecycle.RUNNING:
        return None
    if auto_suspended and desired is Lifecycle.SUSPENDED and state is EngineState.SUSPENDED:
        return Signal.SUSPEND
    return None if state is None else _STEPS.get((desired, state))
