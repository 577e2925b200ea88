"""The tables that derive from the edges of the lifecycle."""

from __future__ import annotations

import itertools

import pytest

from megatron_runtime.headers import EngineState, Headers
from megatron_runtime.lifecycle import (
    EDGES,
    IDLE_STATES,
    SETTLED_STATE,
    SOURCE_STATES,
    STATE_AFTER,
    TARGET_OF_STATE,
    CoordinatorState,
    next_signal,
    reached_states,
)

SETTLED = [state for state in CoordinatorState if state is not CoordinatorState.STOPPING]


@pytest.mark.parametrize(("start", "target"), list(itertools.product(SETTLED, CoordinatorState)))
def test_the_next_signals_lead_from_every_state_to_every_target(
    start: CoordinatorState, target: CoordinatorState
) -> None:
    state, steps = start, 0
    while (signal := next_signal(SETTLED_STATE[state], target)) is not None:
        assert SETTLED_STATE[state] in SOURCE_STATES[signal]
        state, steps = EDGES[state][signal], steps + 1
    assert state is target
    assert steps <= 2


@pytest.mark.parametrize(
    "state", [state for state in EngineState if state.value.endswith("ING") and state != "RUNNING"]
)
def test_no_signal_is_sent_during_a_transition(state: EngineState) -> None:
    assert [next_signal(state, target) for target in CoordinatorState] == [None] * len(CoordinatorState)


def test_an_engine_ends_a_signal_in_the_state_that_the_service_then_has() -> None:
    for signal in (Headers.PAUSE, Headers.UNPAUSE, Headers.SUSPEND, Headers.RESUME):
        assert reached_states(signal)[-1] is SETTLED_STATE[STATE_AFTER[signal]]
    assert reached_states(Headers.RESUME) == (EngineState.RESUMED, EngineState.PAUSED)
    assert reached_states(Headers.STOP) == (EngineState.STOPPING,)
    assert STATE_AFTER[Headers.STOP] is CoordinatorState.RUNNING


def test_every_state_but_the_event_resumed_has_a_target() -> None:
    assert set(EngineState) - set(TARGET_OF_STATE) == {EngineState.RESUMED}
    assert TARGET_OF_STATE[EngineState.RESUMING] is CoordinatorState.PAUSED
    assert {EngineState.PAUSED, EngineState.SUSPENDED} == IDLE_STATES
