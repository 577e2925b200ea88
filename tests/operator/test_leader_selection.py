"""The role of the leader moves between pods."""

from __future__ import annotations

from planning_support.planning import Planning, created, deleted

from megatron_operator.events import events_between
from megatron_operator.leader_selection import FAILOVER_DELAY, RECHECK_INTERVAL
from megatron_operator.observed_state import Action, CreatePod, EngineState, PodPhase, SendRole, SetRoleLabel


def roles(actions: list[Action]) -> list[tuple[str, bool, int | None]]:
    """The labels that were set."""
    return [(each.name, each.leader, each.epoch) for each in actions if isinstance(each, SetRoleLabel)]


def told(actions: list[Action]) -> list[tuple[str, bool, int]]:
    """Roles that were sent to launchers."""
    return [(each.address, each.leader, each.epoch) for each in actions if isinstance(each, SendRole)]


def moved(planning: Planning, rounds: int = 6) -> list[Action]:
    """Rounds without external events."""
    return [action for _ in range(rounds) for action in planning.round()]


def leading(planning: Planning) -> list[str]:
    """Pods with a coordinator."""
    return [pod.name for pod in planning.cluster.coordinators()]


def selected(planning: Planning) -> list[str]:
    """Pods that the coordinator's Service selects."""
    return [pod.name for pod in planning.cluster.selected()]


def test_the_first_group_leads_from_the_start() -> None:
    planning = Planning(replicas=2)
    pods = [action.manifest for action in planning.round() if isinstance(action, CreatePod)]
    labels = [pod["metadata"]["labels"]["inference.megatron.dev/role"] for pod in pods]
    environments = [
        {entry["name"]: entry.get("value") for entry in pod["spec"]["containers"][0]["env"]} for pod in pods
    ]
    assert labels == ["leader", "worker"]
    assert [(each["MEGATRON_LEADER"], each["MEGATRON_LEADER_EPOCH"]) for each in environments] == [
        ("1", "1"),
        ("0", "0"),
    ]


def test_when_the_leader_pod_fails_another_group_leads_before_a_new_pod_exists() -> None:
    planning = Planning(replicas=2).settled()
    planning.cluster.fail("chat-0-0-0", 137)
    before = planning.status
    assert roles(planning.round()) == [("chat-1-0-0", True, 2)]
    actions = planning.round()
    assert roles(actions) == [("chat-0-0-0", False, None)]
    assert told(actions) == [("10.0.1.0", True, 2)]
    assert leading(planning) == ["chat-1-0-0"]
    planning.round()
    assert planning.status.leader is not None
    assert (planning.status.leader.pod, planning.status.leader.replica_group, planning.status.leader.epoch) == (
        "chat-1-0-0",
        1,
        2,
    )
    events = [event for event in events_between(before, planning.status) if event.reason == "LeaderMoved"]
    assert [event.message for event in events] == [
        "chat-1-0-0 is the leader, after chat-0-0-0: it runs the coordinator (epoch 2)"
    ]


def test_a_former_leader_group_returns_as_a_worker() -> None:
    planning = Planning(replicas=2).settled()
    planning.cluster.fail("chat-0-0-0")
    moved(planning)
    planning.cluster.now += 100
    assert created(planning.round()) == ["chat-0-1-0"]
    assert not planning.cluster.pods["chat-0-1-0"].leader
    planning.settled()
    assert leading(planning) == ["chat-1-0-0"]
    assert planning.cluster.engine_state is EngineState.RUNNING


def test_a_single_group_leads_again_with_its_next_attempt() -> None:
    planning = Planning(replicas=1).settled()
    planning.cluster.fail("chat-0-0-0")
    assert roles(moved(planning)) == []
    planning.cluster.now += 100
    assert created(planning.round()) == ["chat-0-1-0"]
    assert (planning.cluster.pods["chat-0-1-0"].leader, planning.cluster.pods["chat-0-1-0"].epoch) == (True, 2)


def test_a_deleted_leader_hands_over_while_it_drains() -> None:
    planning = Planning(replicas=2).settled()
    planning.cluster.delete("chat-0-0-0", 75)
    assert roles(planning.round()) == [("chat-0-0-0", False, None)]
    assert roles(planning.round()) == [("chat-1-0-0", True, 2)]
    assert told(planning.round()) == [("10.0.1.0", True, 2)]
    assert told(planning.round()) == [("10.0.0.0", False, 2)]
    assert leading(planning) == ["chat-1-0-0"]


def test_an_unreachable_leader_loses_the_role_after_the_grace_period() -> None:
    planning = Planning(replicas=2).settled()
    planning.cluster.stand_still("chat-0-0-0")
    assert roles(moved(planning)) == []
    assert planning.look().requeue_after == FAILOVER_DELAY
    planning.cluster.now += FAILOVER_DELAY
    moved(planning)
    assert selected(planning) == ["chat-1-0-0"]


def test_an_unreachable_leader_keeps_the_role_while_engines_are_registered() -> None:
    planning = Planning(replicas=3).settled()
    planning.cluster.reachable = False
    planning.cluster.now += 10 * FAILOVER_DELAY
    assert roles(moved(planning)) == []
    assert planning.look().requeue_after == RECHECK_INTERVAL
    planning.cluster.reachable = True
    planning.cluster.stand_still("chat-0-0-0")
    planning.cluster.now += FAILOVER_DELAY
    moved(planning)
    assert selected(planning) == ["chat-1-0-0"]


def test_an_unreachable_leader_keeps_the_role_while_all_pods_are_unreachable() -> None:
    planning = Planning(replicas=2).settled()
    for pod in ("chat-0-0-0", "chat-1-0-0"):
        planning.cluster.stand_still(pod)
    planning.cluster.now += 10 * FAILOVER_DELAY
    assert roles(moved(planning)) == []
    planning.cluster.go_on("chat-1-0-0")
    moved(planning)
    assert selected(planning) == ["chat-1-0-0"]


def test_an_unreachable_new_leader_is_replaced_while_engines_are_registered_with_its_predecessor() -> None:
    planning = Planning(replicas=3).settled()
    planning.cluster.change("chat-0-0-0", leader=False)
    planning.cluster.change("chat-1-0-0", leader=True, epoch=2)
    planning.cluster.stand_still("chat-1-0-0")
    planning.cluster.now += FAILOVER_DELAY
    moved(planning)
    assert selected(planning) == leading(planning) == ["chat-0-0-0"]


def test_the_first_of_several_unregistered_pods_gets_the_role_once() -> None:
    planning = Planning(replicas=3)
    planning.round()
    for _ in range(3):
        for pod in ("chat-1-0-0", "chat-2-0-0"):
            planning.cluster.start(pod)
    planning.cluster.now += 10 * FAILOVER_DELAY
    assert roles(moved(planning)) == [("chat-0-0-0", False, None), ("chat-1-0-0", True, 2)]


def test_an_unready_reachable_leader_keeps_the_role() -> None:
    planning = Planning(replicas=2).settled()
    planning.cluster.unready("chat-0-0-0")
    planning.cluster.now += FAILOVER_DELAY
    assert roles(moved(planning)) == []
    assert leading(planning) == ["chat-0-0-0"]


def test_a_leader_that_can_not_start_does_not_block_the_others() -> None:
    planning = Planning(replicas=2)
    planning.round()
    for _ in range(3):
        planning.cluster.start("chat-1-0-0")
    assert not planning.cluster.pods["chat-1-0-0"].ready
    planning.cluster.now += FAILOVER_DELAY
    moved(planning)
    planning.cluster.start("chat-1-0-0")
    assert planning.cluster.pods["chat-1-0-0"].ready
    assert leading(planning) == ["chat-1-0-0"]
    # The pod was promoted, and is then told that it does not lead.
    planning.cluster.start("chat-0-0-0")
    moved(planning)
    assert leading(planning) == ["chat-1-0-0"]


def test_a_former_leader_steps_down_when_it_is_reachable_again() -> None:
    planning = Planning(replicas=2).settled()
    planning.cluster.stand_still("chat-0-0-0")
    planning.cluster.now += FAILOVER_DELAY
    actions = [planning.round(), planning.round()]
    assert [roles(each) for each in actions] == [[("chat-0-0-0", False, None)], [("chat-1-0-0", True, 2)]]
    moved(planning)
    assert leading(planning) == ["chat-0-0-0", "chat-1-0-0"]
    planning.cluster.go_on("chat-0-0-0")
    moved(planning)
    assert leading(planning) == ["chat-1-0-0"]


def test_a_leader_hands_over_before_its_group_is_removed_by_scaling() -> None:
    planning = Planning(replicas=2).settled()
    planning.cluster.fail("chat-0-0-0")
    moved(planning)
    planning.cluster.now += 100
    planning.settled()
    planning.spec["replicas"] = 1
    gone: list[str] = []
    while not gone:
        gone = deleted(planning.round())
        assert not gone or leading(planning) == ["chat-0-1-0"]
    assert gone == ["chat-1-0-0"]


def test_a_rollout_hands_over_to_an_updated_group_before_it_replaces_the_leader() -> None:
    planning = Planning(replicas=2).settled()
    planning.spec["restart"] = {"id": "now"}
    for _ in range(40):
        gone = deleted(planning.round())
        assert "chat-0-0-0" not in gone or leading(planning) == ["chat-1-1-0"]
        assert planning.cluster.engine_state is EngineState.RUNNING
        planning.cluster.start_all()
    assert leading(planning) == ["chat-1-1-0"]
    assert sorted(planning.cluster.pods) == ["chat-0-1-0", "chat-1-1-0"]


def test_the_desired_lifecycle_is_sent_with_the_role() -> None:
    planning = Planning(replicas=2, lifecycle="Paused").settled()
    planning.cluster.fail("chat-0-0-0")
    moved(planning)
    assert planning.cluster.engine_state is EngineState.PAUSED
    assert planning.status.engine_state == "PAUSED"


def test_of_two_leaders_only_that_with_the_latest_epoch_stays() -> None:
    planning = Planning(replicas=2).settled()
    planning.cluster.change("chat-1-0-0", leader=True, epoch=2)
    assert roles(planning.round()) == [("chat-0-0-0", False, None)]
    moved(planning)
    assert leading(planning) == ["chat-1-0-0"]


def test_a_leader_with_a_later_epoch_gets_a_new_one() -> None:
    planning = Planning(replicas=1).settled()
    planning.cluster.change("chat-0-0-0", reports_leader=False, known_epoch=7)
    actions = moved(planning)
    assert roles(actions) == [("chat-0-0-0", True, 8)]
    assert told(actions) == [("10.0.0.0", True, 8)]


def test_a_leader_pod_on_a_lost_node_does_not_block_the_next_leader() -> None:
    planning = Planning(replicas=1).settled()
    planning.cluster.delete("chat-0-0-0")
    planning.cluster.now += 100
    for _ in range(6):
        planning.round()
        for pod in planning.cluster.live():
            planning.cluster.start(pod.name)
    assert [pod.name for pod in planning.cluster.selected()] == ["chat-0-1-0"]
    assert planning.cluster.pods["chat-0-1-0"].phase is PodPhase.RUNNING


def test_the_status_reports_a_missing_leader() -> None:
    planning = Planning(replicas=2).settled()
    planning.cluster.fail("chat-0-0-0")
    planning.round()
    ready = next(each for each in planning.status.conditions if each.type == "Ready")
    assert (ready.status, ready.reason) == ("False", "LeaderMoving")
