"""Single decisions of the plan."""

from __future__ import annotations

from typing import Any

import pytest
from planning_support.resources import parsed, widened
from planning_support.simulation import ALLOWED_FROM, SimulatedCluster

from megatron_operator.api.v1alpha1 import Lifecycle, MegatronInference, Status
from megatron_operator.groups import LOST_AFTER
from megatron_operator.lifecycle import next_signal
from megatron_operator.plan import Plan, plan
from megatron_operator.status import build_status
from megatron_operator.world import (
    Action,
    ApplyChild,
    CreatePod,
    CreateSecret,
    DeletePod,
    EngineState,
    Failure,
    PodPhase,
    SendSignal,
)


class Planning:
    """A resource, the cluster it lives in, and rounds of planning over both."""

    def __init__(self, pods_per_group: int = 1, **spec: Any) -> None:
        self.cluster = SimulatedCluster()
        self.status = Status()
        self.spec = spec
        self.pods_per_group = pods_per_group

    @property
    def resource(self) -> MegatronInference:
        return widened(parsed(self.status, **self.spec), self.pods_per_group)

    def look(self) -> Plan:
        """Plans without doing anything."""
        return plan(self.resource, self.cluster.world())

    def round(self) -> list[Action]:
        """Plans, acts, and writes the status."""
        resource, world = self.resource, self.cluster.world()
        actions = list(plan(resource, world).actions)
        self.status = build_status(resource, world)
        for action in actions:
            self.cluster.carry_out(action)
        return actions

    def settled(self) -> Planning:
        """Everything up and nothing left to do."""
        for _ in range(8):
            self.round()
            self.cluster.start_all()
            self.cluster.advance_engine()
        assert self.round() == []
        return self


def created(actions: list[Action]) -> list[str]:
    return [action.manifest["metadata"]["name"] for action in actions if isinstance(action, CreatePod)]


def deleted(actions: list[Action]) -> list[str]:
    return [action.name for action in actions if isinstance(action, DeletePod)]


def sent(actions: list[Action]) -> list[str]:
    return [action.signal for action in actions if isinstance(action, SendSignal)]


def restarts(actions: list[Action]) -> list[str]:
    annotations = [action.manifest["metadata"]["annotations"] for action in actions if isinstance(action, CreatePod)]
    return [each["inference.megatron.dev/restarts"] for each in annotations]


def test_the_first_round_makes_the_secret_and_the_services_before_the_pods() -> None:
    kinds = [type(action) for action in Planning(replicas=2).round()]
    assert kinds == [CreateSecret, ApplyChild, ApplyChild, ApplyChild, CreatePod, CreatePod]


def test_nothing_is_done_once_all_is_as_wished() -> None:
    assert Planning(replicas=2).settled().look() == Plan()


def test_a_service_that_someone_deleted_or_changed_is_applied_again() -> None:
    planning = Planning().settled()
    del planning.cluster.children["Service/chat"]
    planning.cluster.children["Service/chat-coordinator"] = "edited"
    names = [action.manifest["metadata"]["name"] for action in planning.round() if isinstance(action, ApplyChild)]
    assert names == ["chat-coordinator", "chat"]


def test_the_secret_is_made_only_once() -> None:
    planning = Planning().settled()
    planning.spec["engine"] = {"maxRequests": 3}
    assert not any(isinstance(action, CreateSecret) for action in planning.round())


def test_scaling_up_adds_groups_and_leaves_the_others() -> None:
    planning = Planning(replicas=1).settled()
    planning.spec["replicas"] = 3
    actions = planning.round()
    assert created(actions) == ["chat-1-0-0", "chat-2-0-0"]
    assert deleted(actions) == []


def test_scaling_down_removes_the_highest_groups_first_and_lets_them_drain() -> None:
    planning = Planning(replicas=3, rollout={"drainTimeout": "20s"}).settled()
    planning.spec["replicas"] = 1
    actions = planning.round()
    assert deleted(actions) == ["chat-2-0-0", "chat-1-0-0"]
    assert [action.grace_seconds for action in actions if isinstance(action, DeletePod)] == [35, 35]


def test_stopped_ends_every_pod_and_keeps_the_children() -> None:
    planning = Planning(replicas=2).settled()
    planning.spec["lifecycle"] = "Stopped"
    assert deleted(planning.round()) == ["chat-1-0-0", "chat-0-0-0"]
    planning.cluster.start_all()
    assert planning.round() == []
    assert "Service/chat" in planning.cluster.children


def test_a_start_after_a_stop_is_a_new_attempt_with_a_whole_budget() -> None:
    planning = Planning(failurePolicy={"maxRestarts": 0}).settled()
    planning.cluster.fail("chat-0-0-0")
    planning.round()
    planning.spec["lifecycle"] = "Stopped"
    planning.round()
    planning.round()
    planning.spec["lifecycle"] = "Running"
    actions = planning.round()
    assert created(actions) == ["chat-0-1-0"]
    assert restarts(actions) == ["0"]


def test_nothing_is_created_for_a_resource_that_is_being_deleted() -> None:
    planning = Planning(replicas=2)
    resource = planning.resource
    going = resource.model_copy(update={"metadata": resource.metadata.model_copy(update={"deletion_timestamp": "now"})})
    assert plan(going, planning.cluster.world()).actions == ()
    planning.settled()
    actions = plan(going, planning.cluster.world()).actions
    assert deleted(list(actions)) == ["chat-1-0-0", "chat-0-0-0"]


# --- failures


def test_a_failed_group_is_tried_again_after_the_back_off_and_the_others_are_left_alone() -> None:
    planning = Planning(replicas=2).settled()
    planning.cluster.fail("chat-1-0-0")
    assert planning.round() == []
    assert planning.look().requeue_after == 10
    planning.cluster.now += 10
    actions = planning.round()
    assert created(actions) == ["chat-1-1-0"]
    assert deleted(actions) == []


def test_the_pod_that_failed_is_kept_until_its_successor_is_seen() -> None:
    planning = Planning().settled()
    planning.cluster.fail("chat-0-0-0")
    planning.cluster.now += 10
    planning.round()
    assert "chat-0-0-0" in planning.cluster.pods
    assert deleted(planning.round()) == ["chat-0-0-0"]


def test_the_back_off_doubles_up_to_its_longest() -> None:
    planning = Planning(failurePolicy={"backoff": "10s", "maxBackoff": "60s"})
    planning.round()
    waits = []
    for attempt in range(5):
        planning.cluster.start_all()
        planning.cluster.fail(f"chat-0-{attempt}-0")
        planning.round()
        waits.append(planning.look().requeue_after)
        planning.cluster.now += waits[-1] or 0
        planning.round()
    assert waits == [10, 20, 40, 60, 60]


def test_a_group_whose_budget_is_spent_is_given_up() -> None:
    planning = Planning(failurePolicy={"maxRestarts": 1}).settled()
    planning.cluster.fail("chat-0-0-0")
    planning.cluster.now += 10
    assert restarts(planning.round()) == ["1"]
    planning.cluster.run_up()
    planning.cluster.fail("chat-0-1-0")
    planning.cluster.now += 3600
    planning.round()
    assert planning.look() == Plan()


def test_a_spent_budget_is_seen_in_the_pods_alone() -> None:
    planning = Planning(failurePolicy={"maxRestarts": 1}).settled()
    planning.cluster.change("chat-0-0-0", restarts=1)
    planning.cluster.fail("chat-0-0-0")
    planning.cluster.now += 3600
    planning.status = Status()
    assert created(planning.round()) == []


def test_a_spent_budget_is_remembered_when_the_pods_are_gone() -> None:
    planning = Planning(failurePolicy={"maxRestarts": 0}).settled()
    planning.cluster.fail("chat-0-0-0")
    planning.round()
    planning.cluster.remove("chat-0-0-0")
    assert created(planning.round()) == []


def test_ranks_restarted_in_place_count_against_the_budget() -> None:
    planning = Planning(failurePolicy={"maxRestarts": 3}).settled()
    planning.cluster.change("chat-0-0-0", launcher_restarts=3)
    planning.round()
    planning.cluster.fail("chat-0-0-0")
    planning.cluster.change("chat-0-0-0", launcher_restarts=0)
    planning.cluster.now += 3000
    assert created(planning.round()) == []


def test_a_group_that_lived_long_has_its_whole_budget_again() -> None:
    planning = Planning(failurePolicy={"maxRestarts": 1, "resetAfter": "1h"}).settled()
    planning.cluster.change("chat-0-0-0", restarts=1)
    planning.cluster.now += 3600
    planning.cluster.fail("chat-0-0-0")
    planning.cluster.now += 10
    actions = planning.round()
    assert created(actions) == ["chat-0-1-0"]
    assert restarts(actions) == ["1"]


def test_bad_input_is_not_tried_again_until_the_spec_changes() -> None:
    planning = Planning().settled()
    planning.cluster.fail("chat-0-0-0", exit_code=2, reason="CheckpointError")
    planning.cluster.now += 3600
    assert planning.round() == []
    planning.spec["model"] = {"source": {"path": "/models/other.gguf"}}
    assert created(planning.round()) == ["chat-0-1-0"]


def test_a_pod_that_ends_without_an_error_has_failed_too() -> None:
    planning = Planning().settled()
    planning.cluster.change("chat-0-0-0", phase=PodPhase.SUCCEEDED, finished_at=planning.cluster.now)
    planning.cluster.now += 10
    assert created(planning.round()) == ["chat-0-1-0"]


def test_a_start_that_takes_too_long_is_tried_again_once_its_pods_are_gone() -> None:
    planning = Planning(failurePolicy={"startupTimeout": "5m"})
    planning.round()
    assert planning.look().requeue_after == 300
    planning.cluster.now += 300
    assert deleted(planning.round()) == ["chat-0-0-0"]
    assert created(planning.round()) == []
    planning.cluster.start_all()
    planning.cluster.now += 10
    actions = planning.round()
    assert created(actions) == ["chat-0-1-0"]
    assert restarts(actions) == ["1"]


def test_a_pod_without_a_place_may_wait_as_long_as_it_takes() -> None:
    planning = Planning(failurePolicy={"startupTimeout": "5m"})
    planning.round()
    planning.cluster.change("chat-0-0-0", waiting=Failure("Unschedulable", "0/3 nodes have a GPU"))
    planning.cluster.now += 3600
    assert planning.look() == Plan()


def test_a_pod_that_someone_deleted_is_followed_by_a_new_attempt_that_costs_nothing() -> None:
    planning = Planning().settled()
    planning.cluster.delete("chat-0-0-0")
    assert planning.round() == []
    planning.cluster.remove("chat-0-0-0")
    actions = planning.round()
    assert created(actions) == ["chat-0-1-0"]
    assert restarts(actions) == ["0"]


def test_a_pod_that_hangs_on_a_dead_node_is_not_waited_for_for_ever() -> None:
    planning = Planning().settled()
    planning.cluster.delete("chat-0-0-0", grace_seconds=30)
    assert planning.look().requeue_after == 30 + LOST_AFTER
    planning.cluster.now += 30 + LOST_AFTER
    assert created(planning.round()) == ["chat-0-1-0"]


def test_a_creation_decided_twice_is_the_same_creation() -> None:
    planning = Planning().settled()
    planning.cluster.fail("chat-0-0-0")
    planning.cluster.now += 10
    before = planning.cluster.world()
    first = plan(planning.resource, before).actions
    planning.status = build_status(planning.resource, before)
    assert created(list(plan(planning.resource, before).actions)) == created(list(first))


# --- groups of several pods


def test_a_group_fails_as_a_whole_and_starts_again_once_none_of_it_runs() -> None:
    planning = Planning(pods_per_group=2).settled()
    planning.cluster.fail("chat-0-0-1")
    assert deleted(planning.round()) == ["chat-0-0-0"]
    planning.cluster.change("chat-0-0-0", deletion_deadline=None)  # The deletion was lost.
    planning.cluster.now += 10
    actions = planning.round()
    assert deleted(actions) == ["chat-0-0-0"]
    assert created(actions) == []
    assert created(planning.round()) == ["chat-0-1-0", "chat-0-1-1"]


def test_a_pod_that_was_not_created_with_the_others_is_created_later() -> None:
    planning = Planning(pods_per_group=2)
    planning.round()
    planning.cluster.remove("chat-0-0-1")
    assert created(planning.round()) == ["chat-0-0-1"]


def test_a_group_whose_pod_was_deleted_is_replaced_as_a_whole() -> None:
    planning = Planning(pods_per_group=2).settled()
    planning.cluster.delete("chat-0-0-1")
    assert deleted(planning.round()) == ["chat-0-0-0"]
    planning.cluster.remove("chat-0-0-1")
    assert created(planning.round()) == []
    planning.cluster.remove("chat-0-0-0")
    assert created(planning.round()) == ["chat-0-1-0", "chat-0-1-1"]


# --- roll-outs


def test_a_changed_template_replaces_one_group_at_a_time_and_the_leader_last() -> None:
    planning = Planning(replicas=3).settled()
    planning.spec["restart"] = {"id": "now"}
    order = []
    for _ in range(40):
        order += deleted(planning.round())
        assert len(planning.cluster.live()) >= 2
        planning.cluster.start_all()
    assert order == ["chat-2-0-0", "chat-1-0-0", "chat-0-0-0"]
    assert sorted(planning.cluster.pods) == ["chat-0-1-0", "chat-1-1-0", "chat-2-1-0"]


def test_a_roll_out_stops_at_the_first_group_that_does_not_come_up() -> None:
    planning = Planning(replicas=3).settled()
    planning.spec["image"] = "broken:1"
    planning.round()
    planning.cluster.remove("chat-2-0-0")
    for _ in range(5):
        planning.round()
    assert sorted(pod.name for pod in planning.cluster.live()) == ["chat-0-0-0", "chat-1-0-0", "chat-2-1-0"]


def test_a_group_that_serves_nobody_yet_takes_the_new_template_at_once() -> None:
    planning = Planning(replicas=2)
    planning.round()
    planning.spec["image"] = "mended:2"
    assert deleted(planning.round()) == ["chat-0-0-0", "chat-1-0-0"]


# --- lifecycle


@pytest.mark.parametrize(
    ("wish", "path"),
    [("Paused", ["pause"]), ("Suspended", ["pause", "suspend"])],
)
def test_a_wish_is_walked_one_edge_at_a_time_and_back(wish: str, path: list[str]) -> None:
    planning = Planning().settled()
    back = {"pause": "unpause", "suspend": "resume"}
    for target, expected in ((wish, path), ("Running", [back[signal] for signal in reversed(path)])):
        planning.spec["lifecycle"] = target
        walked = []
        for _ in range(6):
            walked += sent(planning.round())
            assert sent(planning.round()) == [], "nothing is sent while the engine is in between"
            planning.cluster.advance_engine()
        assert walked == expected
    assert planning.cluster.refused == []


@pytest.mark.parametrize("wish", list(Lifecycle))
@pytest.mark.parametrize("state", [*EngineState, None])
def test_every_signal_is_one_that_the_engine_takes(wish: Lifecycle, state: EngineState | None) -> None:
    signal = next_signal(wish, state)
    assert signal is None or state in ALLOWED_FROM[signal]


def test_no_signal_is_sent_to_an_engine_that_does_not_answer() -> None:
    planning = Planning().settled()
    planning.cluster.reachable = False
    planning.spec["lifecycle"] = "Paused"
    assert planning.round() == []


def test_the_wish_is_applied_again_when_an_engine_comes_back_in_another_state() -> None:
    planning = Planning(lifecycle="Suspended").settled()
    planning.cluster.engine_state = EngineState.RUNNING
    assert sent(planning.round()) == ["pause"]
