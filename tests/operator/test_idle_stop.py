"""Scale to zero: the stop of an idle model, and its start by a request."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from planning_support.planning import Planning, created, deleted

from megatron_operator.api.parse import InvalidResource
from megatron_operator.api.v1alpha1 import ConditionType, Lifecycle, MegatronInferenceStatus, Phase
from megatron_operator.events import events_between
from megatron_operator.idle_stop import LOOK_INTERVAL, STOP_DELAY
from megatron_operator.observed_state import EngineState
from megatron_operator.plan import plan
from megatron_operator.settings import Settings
from megatron_operator.status import build_status
from megatron_operator.timestamps import timestamp

IDLE = {"idleAfter": "1m", "stopAfter": "10m"}


def with_activator(**spec: Any) -> Planning:
    planning = Planning(**{"autoSuspend": IDLE, **spec})
    planning.settings = Settings(has_spare_nodes=False, has_activator=True)
    return planning.settled()


def asleep(**spec: Any) -> Planning:
    """A model whose engine was suspended because it was idle."""
    planning = with_activator(**spec)
    planning.cluster.fall_asleep()
    planning.round()
    return planning


def stopped(**spec: Any) -> Planning:
    planning = asleep(**spec)
    planning.cluster.now += 600
    stop(planning)
    assert planning.cluster.pods == {}
    return planning


def stop(planning: Planning) -> None:
    """The record of a stop that is due, and the stop after the delay."""
    planning.round()
    planning.cluster.now += STOP_DELAY
    run(planning)


def run(planning: Planning, rounds: int = 8) -> None:
    for _ in range(rounds):
        planning.round()
        planning.cluster.start_all()
        planning.cluster.advance_engine()


def activate(planning: Planning, ahead: float = 0.0) -> None:
    """What an activator writes when a request arrives."""
    now = timestamp(planning.cluster.now + ahead)
    record = planning.status.idle_stop_time
    planning.status = planning.status.model_copy(update={"activation_time": max(now, record or now)})


def ready_reason(status: MegatronInferenceStatus) -> str:
    condition = status.condition(ConditionType.READY)
    assert condition is not None
    return condition.reason


def test_a_model_that_stays_idle_is_stopped_after_the_time() -> None:
    planning = asleep()
    planning.cluster.now += 599
    assert planning.round() == []
    assert planning.look().requeue_after == pytest.approx(1, abs=1)
    planning.cluster.now += 1
    assert planning.round() == []
    assert planning.status.idle_stop_time == timestamp(planning.cluster.now)
    planning.cluster.now += STOP_DELAY - 1
    assert planning.round() == []
    assert planning.look().requeue_after == pytest.approx(1)
    planning.cluster.now += 1
    assert deleted(planning.round()) == ["chat-0-0-0"]


def test_a_stopped_model_has_no_pods_and_says_what_starts_it() -> None:
    planning = stopped(replicas=2)
    assert planning.round() == []
    assert planning.status.phase is Phase.STOPPED
    ready = planning.status.condition(ConditionType.READY)
    assert ready is not None
    assert (ready.status, ready.reason) == ("False", "IdleStopped")
    assert "the next request starts them" in ready.message


def test_a_request_starts_the_model_again() -> None:
    planning = stopped(replicas=2)
    activate(planning)
    assert sorted(created(planning.round())) == ["chat-0-1-0", "chat-1-1-0"]
    run(planning)
    assert planning.status.phase is Phase.RUNNING
    assert planning.status.idle_stop_time is None


def test_a_started_model_is_stopped_again_also_if_the_clock_of_the_activator_is_ahead() -> None:
    planning = stopped()
    activate(planning, ahead=700)
    run(planning)
    planning.cluster.fall_asleep()
    planning.round()
    planning.cluster.now += 600
    planning.round()
    planning.cluster.now += 101 + LOOK_INTERVAL
    stop(planning)
    assert planning.cluster.pods == {}
    assert planning.status.phase is Phase.STOPPED


def test_a_request_that_resumes_the_engine_before_the_pods_are_deleted_keeps_them() -> None:
    planning = asleep()
    planning.cluster.now += 600
    planning.round()
    assert planning.status.idle_stop_time is not None
    planning.cluster.wake()
    assert planning.round() == []
    assert planning.status.idle_stop_time is None


def test_an_activator_has_the_time_to_send_a_request_that_came_after_the_record() -> None:
    planning = asleep()
    planning.cluster.now += 600
    planning.round()
    assert planning.status.idle_stop_time is not None
    planning.cluster.now += 1
    activate(planning)
    for _ in range(int(LOOK_INTERVAL)):
        assert planning.round() == []
        assert planning.status.idle_stop_time is None
        planning.cluster.now += 1
    planning.round()
    assert planning.status.idle_stop_time == timestamp(planning.cluster.now)


def test_an_activator_has_the_time_to_see_that_a_model_runs_before_it_is_stopped_again() -> None:
    planning = with_activator(autoSuspend={"idleAfter": "1s", "stopAfter": "1s"})
    planning.cluster.fall_asleep()
    planning.round()
    for _ in range(int(LOOK_INTERVAL)):
        assert planning.round() == []
        assert planning.status.idle_stop_time is None
        planning.cluster.now += 1
    planning.round()
    assert planning.status.idle_stop_time is not None


@pytest.mark.parametrize("change", [{"state": EngineState.RESUMING}, {"waiting_requests": 1}])
def test_a_request_that_waits_for_the_engine_ends_the_stop(change: dict[str, Any]) -> None:
    planning = asleep()
    planning.cluster.now += 600
    planning.round()
    observed = planning.cluster.observed()
    assert observed.engine is not None
    later = replace(observed, now=observed.now + 60, engine=replace(observed.engine, **change))
    assert plan(planning.resource, later, planning.settings).actions == ()
    assert build_status(planning.resource, later, planning.settings).idle_stop_time is None


def test_a_request_during_the_stop_starts_the_next_attempt_when_the_pods_have_ended() -> None:
    planning = asleep()
    planning.cluster.now += 600
    planning.round()
    planning.cluster.now += STOP_DELAY
    planning.round()
    assert planning.cluster.pods["chat-0-0-0"].deleting
    activate(planning)
    assert planning.round() == []
    run(planning)
    assert sorted(planning.cluster.pods) == ["chat-0-1-0"]


@pytest.mark.parametrize("way", ["no activator", "no stopAfter", "no longer idle"])
def test_without_a_reason_nothing_is_stopped(way: str) -> None:
    planning = with_activator(**({"autoSuspend": {"idleAfter": "1m"}} if way == "no stopAfter" else {}))
    planning.settings = Settings(has_spare_nodes=False, has_activator=way != "no activator")
    if way != "no longer idle":
        planning.cluster.fall_asleep()
    for _ in range(5):
        planning.cluster.now += 600
        assert planning.round() == []


@pytest.mark.parametrize("change", [{"autoSuspend": {"idleAfter": "1m"}}, {"lifecycle": Lifecycle.SUSPENDED.value}])
def test_a_change_of_the_spec_starts_the_model(change: dict[str, Any]) -> None:
    planning = stopped()
    planning.spec.update(change)
    planning.round()
    run(planning)
    assert len(planning.cluster.pods) == 1


def test_stop_after_without_idle_after_is_refused() -> None:
    with pytest.raises(InvalidResource, match=r"spec.autoSuspend.stopAfter: .*set idleAfter, or remove stopAfter"):
        Planning(autoSuspend={"stopAfter": "10m"}).look()


def test_a_change_of_stop_after_restarts_no_pods() -> None:
    planning = with_activator()
    planning.spec["autoSuspend"] = {**IDLE, "stopAfter": "1h"}
    assert planning.round() == []


def test_events_report_stop_and_start() -> None:
    planning = asleep()
    planning.cluster.now += 600
    before = planning.status
    planning.round()
    assert "IdleStopped" in [event.reason for event in events_between(before, planning.status)]
    stop(planning)
    activate(planning)
    before = planning.status
    planning.round()
    assert "Activated" in [event.reason for event in events_between(before, planning.status)]


def test_the_reason_while_the_pods_end_is_stopping() -> None:
    planning = asleep()
    planning.cluster.now += 600
    planning.round()
    planning.cluster.now += STOP_DELAY
    planning.round()
    planning.round()
    assert ready_reason(planning.status) == "Stopping"


@pytest.mark.repetition
@pytest.mark.parametrize("seed", range(20))
def test_after_a_request_the_model_always_runs(seed: int) -> None:
    chance = random.Random(seed)
    planning = with_activator(replicas=chance.choice([1, 2]), failurePolicy={"maxRestarts": 99})
    for _ in range(40):
        match chance.randrange(4):
            case 0:
                planning.cluster.fall_asleep()
            case 1:
                activate(planning, ahead=chance.randrange(-30, 30))
            case 2 if planning.cluster.pods:
                planning.cluster.fail(chance.choice(sorted(planning.cluster.pods)))
        planning.cluster.now += chance.randrange(700)
        run(planning, chance.randrange(4))
    activate(planning)
    planning.cluster.wake()
    for _ in range(30):
        run(planning, 1)
        planning.cluster.now += 30
    assert planning.status.phase is Phase.RUNNING
