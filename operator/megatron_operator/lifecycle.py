"""Desired lifecycle and engine state: which signal takes the engine one legal step closer."""

from __future__ import annotations

from megatron_operator.api.v1alpha1 import Lifecycle
from megatron_operator.observed_state import EngineState, Signal

SETTLED_STATE = {
    Lifecycle.RUNNING: EngineState.RUNNING,
    Lifecycle.PAUSED: EngineState.PAUSED,
    Lifecycle.SUSPENDED: EngineState.SUSPENDED,
}
"""The engine state that fulfils a lifecycle. Stopped has none: there are no pods."""

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
"""States that end by themselves, and the reasons that conditions use for them."""


def next_signal(desired: Lifecycle, state: EngineState | None, *, auto_suspended: bool = False) -> Signal | None:
    """The signal to send now; None when the engine is in the desired state, or a transition is running.

    An engine that was suspended because it was idle counts as Running. If Suspended is desired, the operator sends the
    signal again, so that no request resumes the engine.
    """
    if auto_suspended and desired is Lifecycle.RUNNING:
        return None
    if auto_suspended and desired is Lifecycle.SUSPENDED and state is EngineState.SUSPENDED:
        return Signal.SUSPEND
    return None if state is None else _STEPS.get((desired, state))
