"""The status in each situation."""

from __future__ import annotations

from typing import Any

import pytest
from planning_support.resources import parsed, resource_object
from planning_support.simulation import SimulatedCluster

from megatron_operator.api.parse import FieldError
from megatron_operator.api.v1alpha1 import Condition, ConditionType, MegatronInferenceStatus, Phase
from megatron_operator.observed_state import EngineState, Failure, Loading
from megatron_operator.plan import plan
from megatron_operator.status import as_json, build_status, invalid_status, old_status


class Watching:
    """A resource whose status is written after every observation."""

    def __init__(self, **spec: Any) -> None:
        self.cluster = SimulatedCluster()
        self.spec = spec
        self.status = MegatronInferenceStatus()

    def act(self) -> None:
        """Plans and applies; keeps the previous status."""
        resource, observed = parsed(self.status, **self.spec), self.cluster.observed()
        self.status = build_status(resource, observed)
        for action in plan(resource, observed).actions:
            self.cluster.carry_out(action)

    def look(self, problems: tuple[str, ...] = ()) -> MegatronInferenceStatus:
        """Writes the current status."""
        self.status = build_status(parsed(self.status, **self.spec), self.cluster.observed(), problems=problems)
        return self.status

    def settled(self) -> Watching:
        for _ in range(8):
            self.act()
            self.cluster.start_all()
            self.cluster.advance_engine()
        self.look()
        return self


def shown(status: MegatronInferenceStatus) -> dict[str, str]:
    """The conditions that are not False, and Ready, with their reasons."""
    kept = [each for each in status.conditions if each.status != "False" or each.type == ConditionType.READY]
    return {f"{each.type}={each.status}": each.reason for each in kept}


def message(status: MegatronInferenceStatus, kind: ConditionType) -> str:
    found = status.condition(kind)
    assert found is not None
    return found.message


def test_an_auto_suspended_model_is_ready() -> None:
    watching = Watching().settled()
    watching.cluster.fall_asleep()
    status = watching.look()
    assert shown(status) == {
        "Ready=True": "AutoSuspended",
        "Available=True": "AutoSuspended",
        "Paused=True": "EngineSuspended",
        "Suspended=True": "EngineSuspended",
    }
    assert status.phase is Phase.SUSPENDED
    assert "the next request resumes it" in message(status, ConditionType.READY)


def test_a_resource_without_pods_is_pending() -> None:
    status = Watching().look()
    assert status.phase is Phase.PENDING
    assert shown(status) == {"Ready=False": "Pending", "Progressing=True": "Pending"}


def test_a_loading_model_shows_its_progress() -> None:
    watching = Watching()
    watching.act()
    watching.cluster.start_all()
    watching.cluster.change("chat-0-0-0", loading=Loading(47 * 2**20, 100 * 2**20))
    status = watching.look()
    assert status.phase is Phase.STARTING
    assert shown(status)["Ready=False"] == "ModelLoading"
    assert message(status, ConditionType.READY) == "chat-0-0-0 loads the weights: 40 % of 100 MiB"


@pytest.mark.parametrize("reason", ["Unschedulable", "ImagePull"])
def test_the_wait_reason_of_a_pod_is_the_reason_of_the_condition(reason: str) -> None:
    watching = Watching()
    watching.act()
    watching.cluster.change("chat-0-0-0", waiting=Failure(reason, "0/3 nodes have a free GPU"))
    status = watching.look()
    assert shown(status)["Ready=False"] == reason
    assert message(status, ConditionType.READY) == "chat-0-0-0 cannot start: 0/3 nodes have a free GPU"


def test_a_group_reports_the_wait_reason_of_the_pod_that_blocks_the_others() -> None:
    watching = Watching(parallelism={"tensor": 3})
    watching.act()
    for pod, phase in (("chat-0-0-0", "Rendezvous"), ("chat-0-0-1", "Starting"), ("chat-0-0-2", "Rendezvous")):
        watching.cluster.start(pod)
        watching.cluster.change(pod, rank_phase=phase, loading=None)
    status = watching.look()
    assert message(status, ConditionType.READY) == "chat-0-0-1 has started; its ranks are not up yet"
    watching.cluster.change("chat-0-0-2", waiting=Failure("ImagePull", "no such image"))
    assert shown(watching.look())["Ready=False"] == "ImagePull"


def test_a_running_engine_is_ready_and_available() -> None:
    status = Watching(replicas=2).settled().status
    assert status.phase is Phase.RUNNING
    assert status.engine_state == "RUNNING"
    assert (status.ready, status.replicas, status.ready_replicas) == ("2/2", 2, 2)
    assert status.url == "http://chat.models.svc:8000/v1"
    assert status.selector == "inference.megatron.dev/name=chat,inference.megatron.dev/index=0"
    assert shown(status) == {"Ready=True": "EngineRunning", "Available=True": "EngineRunning"}
    assert {each.type for each in status.conditions} == set(ConditionType) - {ConditionType.CACHED}


@pytest.mark.parametrize(
    ("state", "phase", "reason", "others"),
    [
        (EngineState.PAUSING, Phase.RUNNING, "Pausing", {"Progressing=True": "Pausing"}),
        (EngineState.PAUSED, Phase.PAUSED, "Paused", {"Paused=True": "EnginePaused"}),
        (EngineState.SUSPENDING, Phase.PAUSED, "Suspending", {"Paused=True": "EngineSuspending"}),
        (
            EngineState.SUSPENDED,
            Phase.SUSPENDED,
            "Suspended",
            {"Paused=True": "EngineSuspended", "Suspended=True": "EngineSuspended"},
        ),
        (EngineState.RESUMING, Phase.SUSPENDED, "Resuming", {"Paused=True": "EngineResuming"}),
        (EngineState.UNPAUSING, Phase.PAUSED, "Unpausing", {"Progressing=True": "Unpausing"}),
    ],
)
def test_each_state_of_the_engine_has_its_conditions(
    state: EngineState, phase: Phase, reason: str, others: dict[str, str]
) -> None:
    watching = Watching().settled()
    watching.cluster.engine_state = state
    status = watching.look()
    assert status.phase is phase
    assert status.engine_state == state
    assert shown(status)["Ready=False"] == reason
    assert others.items() <= shown(status).items()
    assert "Available=True" not in shown(status)


@pytest.mark.parametrize(("desired", "state"), [("Paused", "PAUSED"), ("Suspended", "SUSPENDED")])
def test_a_reached_lifecycle_is_not_progressing(desired: str, state: str) -> None:
    status = Watching(lifecycle=desired).settled().status
    assert status.engine_state == state
    assert "Progressing=True" not in shown(status)


def test_a_pending_lifecycle_change_is_reported() -> None:
    watching = Watching().settled()
    watching.spec["lifecycle"] = "Suspended"
    words = message(watching.look(), ConditionType.PROGRESSING)
    assert words == "the engine is RUNNING; the operator sends pause to reach Suspended"


def test_an_unreachable_leader_makes_conditions_unknown() -> None:
    watching = Watching().settled()
    watching.cluster.reachable = False
    for _ in range(2):
        status = watching.look()
        assert shown(status)["Ready=Unknown"] == "EngineUnreachable"
        assert status.phase is Phase.DEGRADED
        watching.cluster.unready("chat-0-0-0")  # The kubelet does not reach it either.
    watching.cluster.reachable = True
    watching.cluster.change("chat-0-0-0", ready=True)
    assert watching.look().phase is Phase.RUNNING


def test_a_starting_leader_is_not_unreachable() -> None:
    watching = Watching()
    watching.act()
    watching.cluster.start_all()
    assert shown(watching.look())["Ready=False"] == "ModelLoading"


def test_some_groups_down_while_others_serve_is_degraded_but_ready() -> None:
    watching = Watching(replicas=2).settled()
    watching.cluster.fail("chat-1-0-0", exit_code=137)
    status = watching.look()
    assert status.phase is Phase.DEGRADED
    assert shown(status) == {
        "Ready=True": "Degraded",
        "Available=True": "EngineRunning",
        "Progressing=True": "BackOff",
        "Degraded=True": "GroupFailed",
    }
    assert status.ready == "1/2"
    failure = status.replica_groups[1].last_failure
    assert failure is not None
    assert (failure.attempt, failure.pod, failure.rank, failure.exit_code) == (0, "chat-1-0-0", 0, 137)
    words = message(status, ConditionType.DEGRADED)
    assert "chat-1-0-0 rank 0: RankFailed (exit code 137)" in words
    assert "restart 1 of 5 at" in words


def test_the_last_failure_is_kept_after_the_recovery() -> None:
    watching = Watching(replicas=2).settled()
    watching.cluster.fail("chat-1-0-0")
    watching.cluster.now += 10
    watching.settled()
    assert watching.status.phase is Phase.RUNNING
    group = watching.status.replica_groups[1]
    assert (group.attempt, group.restarts) == (1, 1)
    assert group.last_failure is not None
    assert group.last_failure.attempt == 0
    assert watching.status.restarts == 1


def test_an_exhausted_budget_of_the_leader_group_is_failed() -> None:
    watching = Watching(failurePolicy={"maxRestarts": 0}).settled()
    watching.cluster.fail("chat-0-0-0")
    status = watching.look()
    assert status.phase is Phase.FAILED
    assert shown(status)["Failed=True"] == "RestartBudgetExceeded"
    assert shown(status)["Ready=False"] == "RestartBudgetExceeded"
    assert "change restart.id" in message(status, ConditionType.FAILED)


def test_an_exhausted_budget_of_another_group_is_degraded() -> None:
    watching = Watching(replicas=2, failurePolicy={"maxRestarts": 0}).settled()
    watching.cluster.fail("chat-1-0-0")
    status = watching.look()
    assert status.phase is Phase.DEGRADED
    assert shown(status)["Degraded=True"] == "RestartBudgetExceeded"
    assert "Failed=True" not in shown(status)


def test_invalid_input_is_failed_with_the_message_of_the_launcher() -> None:
    watching = Watching()
    watching.act()
    watching.cluster.start_all()
    watching.cluster.fail("chat-0-0-0", exit_code=2, reason="CheckpointError")
    status = watching.look()
    assert shown(status)["Failed=True"] == "CheckpointError"
    assert "no further attempt until the spec changes" in message(status, ConditionType.FAILED)


def test_a_stopped_resource_reports_how_to_start_it() -> None:
    watching = Watching(lifecycle="Stopped").settled()
    assert watching.status.phase is Phase.STOPPED
    assert shown(watching.status) == {"Ready=False": "Stopped"}
    assert "set it to Running" in message(watching.status, ConditionType.READY)


def test_terminating_pods_are_reported() -> None:
    watching = Watching().settled()
    watching.spec["lifecycle"] = "Stopped"
    status = watching.look()
    assert status.phase is Phase.TERMINATING
    assert (
        message(status, ConditionType.PROGRESSING) == "lifecycle is Stopped; waiting for chat-0-0-0 to finish and end"
    )


def test_a_hanging_transition_is_degraded_with_its_groups() -> None:
    watching = Watching(replicas=2, lifecycle="Paused", failurePolicy={"transitionTimeout": "2m"}).settled()
    watching.cluster.engine_state = EngineState.PAUSING
    watching.look()
    watching.cluster.now += 121
    status = watching.look()
    assert shown(status)["Degraded=True"] == "TransitionTimeout"
    assert "waiting for replica group 0, 1" in message(status, ConditionType.DEGRADED)


def test_failed_actions_are_reported() -> None:
    status = Watching().look(problems=("pods is forbidden: no create",))
    assert shown(status)["Ready=False"] == "ApplyFailed"
    assert message(status, ConditionType.DEGRADED) == "pods is forbidden: no create"


def test_a_rollout_reports_the_remaining_groups() -> None:
    watching = Watching(replicas=2, rollout={"maxUnavailable": 1}).settled()
    watching.spec["restart"] = {"id": "1"}
    assert "replica group 0, 1 still runs the previous template" in message(watching.look(), ConditionType.PROGRESSING)


def test_the_transition_time_changes_only_with_the_status() -> None:
    watching = Watching(replicas=2).settled()
    before = {each.type: each for each in watching.status.conditions}
    watching.cluster.now += 60
    watching.cluster.fail("chat-1-0-0")
    after = {each.type: each for each in watching.look().conditions}
    ready, degraded = ConditionType.READY, ConditionType.DEGRADED
    assert after[ready].reason != before[ready].reason
    assert after[ready].last_transition_time == before[ready].last_transition_time
    assert after[degraded].last_transition_time > before[degraded].last_transition_time


def test_an_unchanged_status_is_not_written() -> None:
    watching = Watching(replicas=2).settled()
    before = as_json(watching.status)
    watching.cluster.now += 600
    assert as_json(watching.look()) == before


def test_the_status_has_the_observed_generation() -> None:
    status = Watching().look()
    assert status.observed_generation == 1
    assert {each.observed_generation for each in status.conditions} == {1}


# --- invalid resources


MISTAKE = FieldError("spec.replicas", 0, "must be at least 1; raise it")


def test_an_invalid_resource_is_failed_with_field_value_and_remedy() -> None:
    status = invalid_status(resource_object(), [MISTAKE], now=0.0)
    assert status.phase is Phase.FAILED
    assert shown(status) == {"Ready=False": "InvalidSpec", "Failed=True": "InvalidSpec"}
    assert message(status, ConditionType.FAILED) == "spec.replicas: 0: must be at least 1; raise it"


def test_an_invalid_edit_of_a_serving_resource_keeps_its_status() -> None:
    watching = Watching(replicas=2).settled()
    obj = {**resource_object(), "status": as_json(watching.status)}
    status = invalid_status(obj, [MISTAKE], now=watching.cluster.now)
    assert shown(status)["Ready=Unknown"] == "InvalidSpec"
    assert status.url == watching.status.url
    assert status.replica_groups == watching.status.replica_groups
    types = [Condition.model_validate(each).type for each in as_json(status)["conditions"]]
    assert types == [each for each in ConditionType if each is not ConditionType.CACHED]


def test_an_invalid_status_is_ignored() -> None:
    assert old_status({"status": {"phase": 3}}) == MegatronInferenceStatus()
