"""The effect of signals on a simulated engine."""

from __future__ import annotations

from megatron_operator.observed_state import EngineState, Signal

ALLOWED_FROM = {
    Signal.PAUSE: (EngineState.RUNNING,),
    Signal.UNPAUSE: (EngineState.PAUSED,),
    Signal.SUSPEND: (EngineState.PAUSED,),
    Signal.RESUME: (EngineState.SUSPENDED,),
}
"""The states in which the engine accepts the signal."""
IN_PROGRESS_REASONS = {
    Signal.PAUSE: EngineState.PAUSING,
    Signal.UNPAUSE: EngineState.UNPAUSING,
    Signal.SUSPEND: EngineState.SUSPENDING,
    Signal.RESUME: EngineState.RESUMING,
}
ARRIVES_AT = {
    EngineState.PAUSING: EngineState.PAUSED,
    EngineState.UNPAUSING: EngineState.RUNNING,
    EngineState.SUSPENDING: EngineState.SUSPENDED,
    EngineState.RESUMING: EngineState.PAUSED,
}
