"""Single decisions of the plan."""

from __future__ import annotations

from planning_support.planning import Planning, created, deleted, restarts

from megatron_operator.observed_state import (
    ApplyChild,
    CreatePod,
    CreateSecret,
    DeleteChild,
    DeletePod,
    Failure,
    PodPhase,
)
from megatron_operator.plan import Plan, plan
from megatron_operator.settings import NetworkPolicies, Settings

TWO_PODS = {"tensor": 2}
"""Ranks of a group, one per pod unless the resource says otherwise."""


def test_the_first_round_creates_secret_and_services_before_pods() -> None:
    kinds = [type(action) for action in Planning(replicas=2).round()]
    assert kinds == [CreateSecret, ApplyChild, ApplyChild, ApplyChild, CreatePod, CreatePod]


def test_a_settled_resource_has_no_actions() -> None:
    assert Planning(replicas=2).settled().look() == Plan()


def test_a_deleted_or_changed_service_is_applied_again() -> None:
    planning = Planning().settled()
    del planning.cluster.children["Service/chat"]
    planning.cluster.children["Service/chat-coordinator"] = "edited"
    names = [action.manifest["metadata"]["name"] for action in planning.round() if isinstance(action, ApplyChild)]
    assert names == ["chat-coordinator", "chat"]


def test_a_network_policy_follows_the_setting_of_the_operator() -> None:
    planning = Planning().settled()
    planning.settings = Settings(network_policies=NetworkPolicies("megatron-system"))
    (applied,) = planning.round()
    assert isinstance(applied, ApplyChild)
    assert applied.manifest["kind"] == "NetworkPolicy"
    assert planning.round() == []
    planning.settings = Settings()
    assert planning.round() == [DeleteChild("NetworkPolicy", "chat")]
    assert planning.round() == []


def test_the_secret_is_created_only_once() -> None:
    planning = Planning().settled()
    planning.spec["engine"] = {"maxRequests": 3}
    assert not any(isinstance(action, CreateSecret) for action in planning.round())


def test_scaling_up_adds_groups_and_keeps_the_others() -> None:
    planning = Planning(replicas=1).settled()
    planning.spec["replicas"] = 3
    actions = planning.round()
    assert created(actions) == ["chat-1-0-0", "chat-2-0-0"]
    assert deleted(actions) == []


def test_scaling_down_drains_and_removes_the_highest_groups_first() -> None:
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


def test_a_start_after_a_stop_is_a_new_attempt_with_a_full_budget() -> None:
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


def test_nothing_is_created_for_a_terminating_resource() -> None:
    planning = Planning(replicas=2)
    resource = planning.resource
    going = resource.model_copy(update={"metadata": resource.metadata.model_copy(update={"deletion_timestamp": "now"})})
    assert plan(going, planning.cluster.observed()).actions == ()
    planning.settled()
    actions = plan(going, planning.cluster.observed()).actions
    assert deleted(list(actions)) == ["chat-1-0-0", "chat-0-0-0"]


# --- groups of several pods


def test_a_group_fails_as_a_whole_and_restarts_when_all_its_pods_have_ended() -> None:
    planning = Planning(parallelism=TWO_PODS).settled()
    planning.cluster.fail("chat-0-0-1")
    assert deleted(planning.round()) == ["chat-0-0-0"]
    planning.cluster.change("chat-0-0-0", deletion_deadline=None)  # The deletion was lost.
    planning.cluster.now += 10
    actions = planning.round()
    assert deleted(actions) == ["chat-0-0-0"]
    assert created(actions) == []
    assert created(planning.round()) == ["chat-0-1-0", "chat-0-1-1"]


def test_a_pod_that_was_not_created_with_the_others_is_created_later() -> None:
    planning = Planning(parallelism=TWO_PODS)
    planning.round()
    planning.cluster.remove("chat-0-0-1")
    assert created(planning.round()) == ["chat-0-0-1"]


def test_a_group_whose_pod_was_deleted_is_replaced_as_a_whole() -> None:
    planning = Planning(parallelism=TWO_PODS).settled()
    planning.cluster.delete("chat-0-0-1")
    assert deleted(planning.round()) == ["chat-0-0-0"]
    planning.cluster.remove("chat-0-0-1")
    assert created(planning.round()) == []
    planning.cluster.remove("chat-0-0-0")
    assert created(planning.round()) == ["chat-0-1-0", "chat-0-1-1"]


def test_a_deleted_pod_of_a_running_group_is_not_created_again_alone() -> None:
    planning = Planning(parallelism=TWO_PODS).settled()
    planning.cluster.remove("chat-0-0-1")
    actions = planning.round()
    assert created(actions) == []
    assert deleted(actions) == ["chat-0-0-0"]
    planning.cluster.remove("chat-0-0-0")
    actions = planning.round()
    assert created(actions) == ["chat-0-1-0", "chat-0-1-1"]
    assert restarts(actions) == ["0", "0"]


def test_ranks_that_end_after_the_deletion_of_their_first_pod_have_not_failed() -> None:
    planning = Planning(parallelism=TWO_PODS).settled()
    cluster = planning.cluster
    cluster.remove("chat-0-0-0")
    cluster.change("chat-0-0-1", phase=PodPhase.SUCCEEDED, ready=False, finished_at=cluster.now, rank_phase=None)
    actions = planning.round()
    assert (created(actions), deleted(actions)) == ([], ["chat-0-0-1"])
    actions = planning.round()
    assert created(actions) == ["chat-0-1-0", "chat-0-1-1"]
    assert restarts(actions) == ["0", "0"]
    assert planning.status.replica_groups[0].last_failure is None


def test_the_last_failure_is_that_of_the_failed_rank_and_not_of_its_peers() -> None:
    planning = Planning(parallelism={"tensor": 3}).settled()
    error_line = Failure("LostRank", "rank 0: adding up a layer: rank 1 is missing", rank=1, exit_code=1)
    cluster = planning.cluster
    cluster.change("chat-0-0-0", phase=PodPhase.FAILED, ready=False, finished_at=cluster.now, failure=error_line)
    planning.round()
    (group,) = planning.status.replica_groups
    assert group.last_failure is not None
    assert (group.last_failure.pod, group.last_failure.rank) == ("chat-0-0-0", 1)
    cluster.now += 1
    cluster.change("chat-0-0-1", deletion_deadline=None)  # It exited before it was stopped.
    cluster.fail("chat-0-0-1", exit_code=137)
    planning.round()
    (group,) = planning.status.replica_groups
    assert group.last_failure is not None
    assert (group.last_failure.pod, group.last_failure.reason) == ("chat-0-0-1", "RankFailed")
    assert group.last_failure.exit_code == 137
    assert (group.ready_pods, group.total_pods) == (0, 3)


# --- rollouts


def test_a_changed_template_replaces_one_group_at_a_time_with_the_leader_last() -> None:
    planning = Planning(replicas=3).settled()
    planning.spec["restart"] = {"id": "now"}
    order = []
    for _ in range(40):
        order += deleted(planning.round())
        assert len(planning.cluster.live()) >= 2
        planning.cluster.start_all()
    assert order == ["chat-2-0-0", "chat-1-0-0", "chat-0-0-0"]
    assert sorted(planning.cluster.pods) == ["chat-0-1-0", "chat-1-1-0", "chat-2-1-0"]


def test_a_rollout_stops_at_the_first_group_that_does_not_become_ready() -> None:
    planning = Planning(replicas=3).settled()
    planning.spec["image"] = "broken:1"
    planning.round()
    planning.cluster.remove("chat-2-0-0")
    for _ in range(5):
        planning.round()
    assert sorted(pod.name for pod in planning.cluster.live()) == ["chat-0-0-0", "chat-1-0-0", "chat-2-1-0"]


def test_an_unready_new_group_gets_the_new_template_at_once() -> None:
    planning = Planning(replicas=2)
    planning.round()
    planning.spec["image"] = "mended:2"
    assert deleted(planning.round()) == ["chat-0-0-0", "chat-1-0-0"]
