"""Plans for pods that fail, hang or are deleted."""

from __future__ import annotations

import pytest
from planning_support.planning import Planning, created, deleted, restarts

from megatron_operator.api.quantity import LONGEST_DURATION
from megatron_operator.api.v1alpha1 import ConditionType, MegatronInferenceStatus
from megatron_operator.observed_state import Failure, PodPhase
from megatron_operator.plan import Plan, plan
from megatron_operator.replica_groups import LOST_AFTER
from megatron_operator.status import build_status


def test_a_failed_group_restarts_after_the_backoff_and_the_others_are_kept() -> None:
    planning = Planning(replicas=2).settled()
    planning.cluster.fail("chat-1-0-0")
    assert planning.round() == []
    assert planning.look().requeue_after == 10
    planning.cluster.now += 10
    actions = planning.round()
    assert created(actions) == ["chat-1-1-0"]
    assert deleted(actions) == []


def test_a_failed_pod_is_kept_until_its_successor_is_observed() -> None:
    planning = Planning().settled()
    planning.cluster.fail("chat-0-0-0")
    planning.cluster.now += 10
    planning.round()
    assert "chat-0-0-0" in planning.cluster.pods
    assert deleted(planning.round()) == ["chat-0-0-0"]


def test_the_backoff_doubles_up_to_its_maximum() -> None:
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


def test_a_group_without_restart_budget_is_not_restarted() -> None:
    planning = Planning(failurePolicy={"maxRestarts": 1}).settled()
    planning.cluster.fail("chat-0-0-0")
    planning.cluster.now += 10
    assert restarts(planning.round()) == ["1"]
    planning.cluster.run_up()
    planning.cluster.fail("chat-0-1-0")
    planning.cluster.now += 3600
    planning.round()
    assert planning.look() == Plan()


def test_an_exhausted_budget_follows_from_the_pods_alone() -> None:
    planning = Planning(failurePolicy={"maxRestarts": 1}).settled()
    planning.cluster.change("chat-0-0-0", restarts=1)
    planning.cluster.fail("chat-0-0-0")
    planning.cluster.now += 3600
    planning.status = MegatronInferenceStatus()
    assert created(planning.round()) == []


def test_an_exhausted_budget_is_kept_after_the_deletion_of_the_pods() -> None:
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


def test_a_group_that_ran_long_enough_has_its_full_budget_again() -> None:
    planning = Planning(failurePolicy={"maxRestarts": 1, "resetAfter": "1h"}).settled()
    planning.cluster.change("chat-0-0-0", restarts=1)
    planning.cluster.now += 3600
    planning.cluster.fail("chat-0-0-0")
    planning.cluster.now += 10
    actions = planning.round()
    assert created(actions) == ["chat-0-1-0"]
    assert restarts(actions) == ["1"]


def test_invalid_input_is_not_retried_until_the_spec_changes() -> None:
    planning = Planning().settled()
    planning.cluster.fail("chat-0-0-0", exit_code=2, reason="CheckpointError")
    planning.cluster.now += 3600
    assert planning.round() == []
    planning.spec["model"] = {"source": {"path": "/models/other.gguf"}}
    assert created(planning.round()) == ["chat-0-1-0"]


def test_a_pod_that_exits_with_zero_has_failed_too() -> None:
    planning = Planning().settled()
    planning.cluster.change("chat-0-0-0", phase=PodPhase.SUCCEEDED, finished_at=planning.cluster.now)
    planning.cluster.now += 10
    assert created(planning.round()) == ["chat-0-1-0"]


def test_a_start_after_startup_timeout_is_retried_when_its_pods_have_ended() -> None:
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


@pytest.mark.parametrize("reason", ["Unschedulable", "SchedulingGated"])
def test_an_unscheduled_pod_may_wait_without_limit(reason: str) -> None:
    planning = Planning(failurePolicy={"startupTimeout": "5m"})
    planning.round()
    planning.cluster.change("chat-0-0-0", waiting=Failure(reason, "0/3 nodes have a GPU"), startup_since=None)
    planning.cluster.now += 3600
    assert planning.look() == Plan()


def test_a_pod_that_waited_longer_than_the_startup_timeout_has_the_whole_timeout_once_it_is_scheduled() -> None:
    planning = Planning(failurePolicy={"startupTimeout": "5m"})
    cluster = planning.cluster
    cluster.has_room = False
    planning.round()
    cluster.now += 3600
    assert planning.look() == Plan()
    cluster.schedule("chat-0-0-0")  # Its kubelet has not set the condition Ready yet.
    assert planning.look() == Plan((), 300)
    cluster.now += 299
    assert planning.look() == Plan((), 1)
    cluster.now += 1
    assert deleted(planning.round()) == ["chat-0-0-0"]


def test_a_pod_that_was_ready_has_the_startup_timeout_to_become_ready_again() -> None:
    planning = Planning(failurePolicy={"startupTimeout": "5m"}).settled()
    planning.cluster.now += 3600
    planning.cluster.unready("chat-0-0-0")
    assert planning.look() == Plan((), 300)


def test_the_startup_timeout_of_a_group_begins_when_its_last_pod_is_scheduled() -> None:
    planning = Planning(failurePolicy={"startupTimeout": "5m", "gangTimeout": "0s"}, parallelism={"tensor": 2})
    planning.round()
    cluster = planning.cluster
    cluster.start("chat-0-0-0")
    cluster.change("chat-0-0-0", rank_phase="Rendezvous")
    cluster.change("chat-0-0-1", waiting=Failure("Unschedulable", "0/3 nodes have a GPU"), startup_since=None)
    cluster.now += 3600
    assert planning.look() == Plan()
    cluster.change("chat-0-0-1", waiting=None, phase=PodPhase.RUNNING, startup_since=cluster.now)
    assert planning.look() == Plan((), 300)
    cluster.now += 300
    assert deleted(planning.round()) == ["chat-0-0-1", "chat-0-0-0"]
    (group,) = planning.status.replica_groups
    assert group.last_failure is not None
    assert group.last_failure.message == "chat-0-0-0, chat-0-0-1 were not ready within 5m"


def test_a_deleted_pod_is_replaced_without_using_the_budget() -> None:
    planning = Planning().settled()
    planning.cluster.delete("chat-0-0-0")
    assert planning.round() == []
    planning.cluster.remove("chat-0-0-0")
    actions = planning.round()
    assert created(actions) == ["chat-0-1-0"]
    assert restarts(actions) == ["0"]


def test_a_pod_on_a_lost_node_does_not_block_its_replacement() -> None:
    planning = Planning().settled()
    planning.cluster.delete("chat-0-0-0", grace_seconds=30)
    assert planning.look().requeue_after == 30 + LOST_AFTER
    planning.cluster.now += 30 + LOST_AFTER
    assert created(planning.round()) == ["chat-0-1-0"]


def test_a_repeated_creation_has_the_same_pod_name() -> None:
    planning = Planning().settled()
    planning.cluster.fail("chat-0-0-0")
    planning.cluster.now += 10
    before = planning.cluster.observed()
    first = plan(planning.resource, before).actions
    planning.status = build_status(planning.resource, before)
    assert created(list(plan(planning.resource, before).actions)) == created(list(first))


# --- disruptions


def test_a_preempted_pod_does_not_count_against_the_budget() -> None:
    planning = Planning(failurePolicy={"maxRestarts": 1}).settled()
    cluster = planning.cluster
    for attempt in range(4):
        cluster.preempt(f"chat-0-{attempt}-0")
        assert planning.round() == []
        assert planning.look().requeue_after == 10
        cluster.now += 10
        actions = planning.round()
        assert (created(actions), restarts(actions)) == ([f"chat-0-{attempt + 1}-0"], ["0"])
        cluster.run_up()
        planning.round()
    (group,) = planning.status.replica_groups
    assert (group.restarts, group.last_failure and group.last_failure.disruption) == (0, True)


def test_restarts_before_a_preemption_still_count_after_it() -> None:
    planning = Planning(failurePolicy={"maxRestarts": 1}).settled()
    cluster = planning.cluster
    cluster.fail("chat-0-0-0")
    cluster.now += 10
    assert restarts(planning.round()) == ["1"]
    cluster.run_up()
    cluster.preempt("chat-0-1-0")
    planning.round()
    cluster.remove("chat-0-1-0")  # Only the status has the failure.
    cluster.now += 10
    assert restarts(planning.round()) == ["1"]
    cluster.run_up()
    cluster.fail("chat-0-2-0")
    cluster.now += 3600
    assert created(planning.round()) == []
    assert planning.status.condition(ConditionType.FAILED).reason == "RestartBudgetExceeded"


def test_peers_of_an_evicted_pod_do_not_count_against_the_budget() -> None:
    planning = Planning(parallelism={"tensor": 2}, failurePolicy={"maxRestarts": 0}).settled()
    cluster = planning.cluster
    cluster.evict("chat-0-0-1")
    lost = Failure("LostRank", "rank 0: adding up a layer: rank 1 is missing", rank=1, exit_code=1)
    cluster.fail("chat-0-0-0")
    cluster.change("chat-0-0-0", failure=lost)
    planning.round()
    (group,) = planning.status.replica_groups
    assert group.last_failure is not None
    assert (group.last_failure.pod, group.last_failure.reason) == ("chat-0-0-1", "EvictionByEvictionAPI")
    cluster.remove("chat-0-0-1")
    cluster.remove("chat-0-0-0")
    cluster.now += 10
    actions = planning.round()
    assert (created(actions), restarts(actions)) == (["chat-0-1-0", "chat-0-1-1"], ["0", "0"])


def test_a_failure_in_a_group_with_an_evicted_pod_counts_against_the_budget() -> None:
    planning = Planning(parallelism={"tensor": 2}, failurePolicy={"maxRestarts": 0}).settled()
    planning.cluster.evict("chat-0-0-1")
    planning.cluster.fail("chat-0-0-0", exit_code=137)
    planning.round()
    failed = planning.status.condition(ConditionType.FAILED)
    assert (failed.status, failed.reason) == ("True", "RestartBudgetExceeded")


def test_the_longest_backoff_is_reported_with_its_time() -> None:
    planning = Planning(failurePolicy={"backoff": LONGEST_DURATION, "maxBackoff": LONGEST_DURATION}).settled()
    planning.cluster.fail("chat-0-0-0")
    planning.round()
    assert planning.round() == []
    progressing = planning.status.condition(ConditionType.PROGRESSING)
    assert progressing is not None
    assert "2033-" in progressing.message
    assert planning.look().requeue_after == 10 * 365 * 86400
