"""The signals by which the plan reaches the desired lifecycle."""

from __future__ import annotations

import pytest
from planning_support.planning import Planning, sent
from planning_support.signals import ALLOWED_FROM

from megatron_operator.api.v1alpha1 import Lifecycle
from megatron_operator.lifecycle import next_signal
from megatron_operator.observed_state import EngineState


@pytest.mark.parametrize(
    ("desired", "path"),
    [("Paused", ["pause"]), ("Suspended", ["pause", "suspend"])],
)
def test_lifecycle_changes_are_sent_one_signal_at_a_time(desired: str, path: list[str]) -> None:
    planning = Planning().settled()
    back = {"pause": "unpause", "suspend": "resume"}
    for target, expected in ((desired, path), ("Running", [back[signal] for signal in reversed(path)])):
        planning.spec["lifecycle"] = target
        walked = []
        for _ in range(6):
            walked += sent(planning.round())
            assert sent(planning.round()) == [], "nothing is sent while the engine is in between"
            planning.cluster.advance_engine()
        assert walked == expected
    assert planning.cluster.refused == []


@pytest.mark.parametrize("desired", list(Lifecycle))
@pytest.mark.parametrize("state", [*EngineState, None])
def test_every_signal_is_valid_in_the_state_of_the_engine(desired: Lifecycle, state: EngineState | None) -> None:
    signal = next_signal(desired, state)
    assert signal is None or state in ALLOWED_FROM[signal]


def test_an_auto_suspended_engine_gets_no_signal() -> None:
    planning = Planning().settled()
    planning.cluster.fall_asleep()
    assert planning.round() == []
    planning.cluster.wake()
    assert planning.round() == []


def test_lifecycle_suspended_prevents_a_resume_by_requests() -> None:
    planning = Planning().settled()
    planning.cluster.fall_asleep()
    planning.spec["lifecycle"] = "Suspended"
    assert sent(planning.round()) == ["suspend"]
    planning.cluster.wake()
    assert planning.cluster.engine_state is EngineState.SUSPENDED
    assert planning.round() == []


def test_an_auto_suspended_engine_is_resumed_before_a_pause() -> None:
    planning = Planning().settled()
    planning.cluster.fall_asleep()
    planning.spec["lifecycle"] = "Paused"
    assert sent(planning.round()) == ["resume"]
    planning.cluster.advance_engine()
    assert planning.round() == []


def test_no_signal_is_sent_to_an_unreachable_engine() -> None:
    planning = Planning().settled()
    planning.cluster.reachable = False
    planning.spec["lifecycle"] = "Paused"
    assert planning.round() == []


def test_the_lifecycle_is_applied_again_when_an_engine_restarts_in_another_state() -> None:
    planning = Planning(lifecycle="Suspended").settled()
    planning.cluster.engine_state = EngineState.RUNNING
    assert sent(planning.round()) == ["pause"]
