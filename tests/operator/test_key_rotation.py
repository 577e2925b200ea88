"""A deleted Secret rotates the keys: all pods end, then others start with new ones."""

from __future__ import annotations

from dataclasses import replace

from planning_support.planning import Planning, created, deleted

from megatron_operator.api.v1alpha1 import ConditionType
from megatron_operator.events import events_between
from megatron_operator.observed_state import CreateSecret
from megatron_operator.plan import plan
from megatron_operator.replica_groups import LOST_AFTER

SECRET = "Secret/chat-keys"


def without_keys(replicas: int) -> Planning:
    """A running resource whose Secret was deleted."""
    planning = Planning(replicas=replicas).settled()
    del planning.cluster.children[SECRET]
    return planning


def made_keys(planning: Planning) -> tuple[bool, list[str]]:
    """Whether the next round creates the Secret, and the pods that it creates."""
    actions = planning.round()
    return any(isinstance(action, CreateSecret) for action in actions), created(actions)


def test_pods_with_old_keys_end_before_new_keys_are_created() -> None:
    planning = without_keys(replicas=2)
    actions = planning.round()
    assert deleted(actions) == ["chat-1-0-0", "chat-0-0-0"]
    assert len(actions) == 2
    assert planning.round() == []
    planning.cluster.remove("chat-1-0-0")
    assert planning.round() == []
    planning.cluster.remove("chat-0-0-0")
    assert made_keys(planning) == (True, ["chat-0-1-0", "chat-1-1-0"])
    planning.settled()


def test_a_key_rotation_does_not_use_the_restart_budget() -> None:
    planning = without_keys(replicas=1)
    planning.round()
    planning.cluster.start_all()
    planning.settled()
    assert planning.status.restarts == 0
    assert all(group.last_failure is None for group in planning.status.replica_groups)


def test_a_rotation_does_not_wait_for_failed_pods() -> None:
    planning = without_keys(replicas=2)
    planning.cluster.fail("chat-1-0-0")
    assert deleted(planning.round()) == ["chat-0-0-0"]
    planning.cluster.remove("chat-0-0-0")
    made, _ = made_keys(planning)
    assert made


def test_a_rotation_does_not_wait_for_pods_lost_with_their_node() -> None:
    planning = without_keys(replicas=1)
    planning.round()
    (pod,) = planning.cluster.pods.values()
    assert pod.deletion_deadline is not None
    left = pod.deletion_deadline + LOST_AFTER - planning.cluster.now
    assert planning.look().requeue_after == left
    planning.cluster.now += left
    assert made_keys(planning) == (True, ["chat-0-1-0"])


def test_pods_are_kept_while_a_secret_of_another_owner_has_the_name() -> None:
    planning = without_keys(replicas=1)
    observed = replace(planning.cluster.observed(), taken=frozenset({SECRET}))
    (action,) = plan(planning.resource, observed).actions
    assert isinstance(action, CreateSecret)  # The rejection names the owner.


def test_a_stopped_resource_gets_new_keys_at_once() -> None:
    planning = Planning().settled()
    planning.spec["lifecycle"] = "Stopped"
    planning.round()
    planning.cluster.start_all()
    del planning.cluster.children[SECRET]
    assert made_keys(planning) == (True, [])


def test_the_status_and_one_event_report_the_rotation() -> None:
    planning = without_keys(replicas=1)
    before = planning.status
    planning.round()
    progressing = planning.status.condition(ConditionType.PROGRESSING)
    assert progressing is not None
    assert (progressing.status, progressing.reason) == ("True", "RotatingKeys")
    assert progressing.message.startswith("the Secret chat-keys was removed")
    first = planning.status
    assert [event.reason for event in events_between(before, first)] == ["RotatingKeys"]
    planning.round()
    assert "RotatingKeys" not in [event.reason for event in events_between(first, planning.status)]
