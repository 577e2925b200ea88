"""Translation between objects of the API server and the observed state."""

from __future__ import annotations

import json
from typing import Any

import pytest
from suite_support.kubernetes_schemas import check

from megatron_operator.control_client import PodReport, RankReport
from megatron_operator.events import Event, EventType
from megatron_operator.kubernetes.api_server import (
    LONGEST_DELAY,
    ServerError,
    ServerRefusal,
    answer_of,
    delay_of,
    path_of,
)
from megatron_operator.kubernetes.kubernetes_event import LONGEST_NOTE, kubernetes_event
from megatron_operator.kubernetes.pod_status import observed_pod
from megatron_operator.observation import Answer, NoAnswer, with_report
from megatron_operator.observed_state import Failure, Loading, NamespaceTerminating, ObservedPod, PodPhase

PREFIX = "inference.megatron.dev"
CREATED, READY_AT = "2026-11-21T10:00:00Z", "2026-11-21T10:01:00Z"
EPOCH = 1795255200.0
"""CREATED in seconds."""


def pod(status: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    labels = {"replica-group": "1", "attempt": "2", "index": "0", "role": "worker", "template-hash": "abc"}
    return {
        "metadata": {
            "name": "chat-1-2-0",
            "uid": "u1",
            "creationTimestamp": CREATED,
            "labels": {f"{PREFIX}/{label}": value for label, value in labels.items()},
            "annotations": {f"{PREFIX}/restarts": "3"},
            **metadata,
        },
        "spec": {"nodeName": "n1"},
        "status": status or {},
    }


def seen(status: dict[str, Any], report: Answer = None, **metadata: Any) -> ObservedPod:
    observed = observed_pod(pod(status, **metadata))
    assert observed is not None
    return with_report(observed, report)


def container(name: str = "megatron", **state: Any) -> dict[str, Any]:
    return {"name": name, "image": "registry/none:1", "state": state}


def terminated(exit_code: int, message: str = "", reason: str = "Error", **rest: Any) -> dict[str, Any]:
    return {"terminated": {"exitCode": exit_code, "reason": reason, "message": message, **rest}}


def test_a_running_pod_is_translated_with_its_identity_and_times() -> None:
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": READY_AT}
    observed = seen({"phase": "Running", "podIP": "10.0.0.1", "conditions": [ready]})
    assert (observed.group, observed.attempt, observed.index, observed.restarts) == (1, 2, 0, 3)
    assert (observed.leader, observed.template_hash, observed.node) == (False, "abc", "n1")
    assert (observed.phase, observed.ready, observed.address) == (PodPhase.RUNNING, True, "10.0.0.1")
    assert (observed.created_at, observed.ready_changed_at) == (EPOCH, EPOCH + 60)
    assert (observed.deleting, observed.waiting, observed.failure) == (False, None, None)


def at(minute: int) -> str:
    return f"2026-11-21T10:{minute:02}:00Z"


def condition(kind: str, status: str, minute: int) -> dict[str, Any]:
    return {"type": kind, "status": status, "lastTransitionTime": at(minute)}


@pytest.mark.parametrize(
    ("status", "minute"),
    [
        ({"conditions": [condition("PodScheduled", "True", 40)]}, 40),
        ({"conditions": [condition("PodScheduled", "True", 5), condition("Ready", "False", 5)]}, 5),
        (
            {
                "conditions": [condition("PodScheduled", "True", 5)],
                "initContainerStatuses": [container("fetch", terminated={"exitCode": 0, "finishedAt": at(30)})],
            },
            30,
        ),
        (
            {
                "conditions": [condition("PodScheduled", "True", 5)],
                "initContainerStatuses": [container("proxy", running={"startedAt": at(59)})],
                "containerStatuses": [container(running={"startedAt": at(20)})],
            },
            20,
        ),
    ],
    ids=["just bound", "known to its kubelet", "init container ended", "image was pulled"],
)
def test_a_start_begins_at_scheduling_after_the_last_init_container_or_the_image_pull(
    status: dict[str, Any], minute: int
) -> None:
    assert seen({"phase": "Pending", **status}).startup_since == EPOCH + 60 * minute


def test_a_pod_without_a_node_has_not_started() -> None:
    bare = pod({"conditions": [condition("PodScheduled", "False", 5)]})
    observed = observed_pod({**bare, "spec": {}})
    assert observed is not None
    assert observed.startup_since is None


def test_a_pod_without_the_labels_is_ignored() -> None:
    assert observed_pod(pod(labels={f"{PREFIX}/name": "chat"})) is None


def test_a_new_pod_without_any_status_is_pending() -> None:
    observed = seen({})
    assert (observed.phase, observed.ready, observed.address, observed.waiting) == (PodPhase.PENDING, False, None, None)


def test_the_state_of_the_launcher_is_added() -> None:
    ranks = (RankReport(0, "Serving", registered=True), RankReport(1, "Loading", 20, 100))
    report = PodReport(revision=7, ready=False, ranks=ranks, restarts=1)
    observed = seen({"phase": "Running"}, report)
    assert (observed.rank_phase, observed.loading, observed.launcher_restarts) == ("Loading", Loading(20, 100), 1)
    assert (observed.registered, observed.unreachable_since) == (True, None)


def test_a_pod_is_unreachable_since_its_creation_or_its_first_failed_poll() -> None:
    assert seen({"phase": "Pending"}).unreachable_since == EPOCH
    assert seen({"phase": "Running"}, NoAnswer(EPOCH + 90, "timed out")).unreachable_since == EPOCH + 90


@pytest.mark.parametrize(
    ("status", "waiting"),
    [
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "full"}]},
            Failure("Unschedulable", "full"),
        ),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]},
            Failure("SchedulingGated", "no node fits"),
        ),
        (
            {"containerStatuses": [container(waiting={"reason": "ErrImagePull", "message": "not found"})]},
            Failure("ImagePull", "image registry/none:1: not found"),
        ),
        (
            {"initContainerStatuses": [container("fetch", waiting={"reason": "ImagePullBackOff"})]},
            Failure("ImagePull", "image registry/none:1: container fetch waits: ImagePullBackOff"),
        ),
        (
            {
                "containerStatuses": [
                    container(waiting={"reason": "CreateContainerConfigError", "message": "no secret"})
                ]
            },
            Failure("CreateContainerConfigError", "no secret"),
        ),
        ({"containerStatuses": [container(waiting={"reason": "ContainerCreating"})]}, None),
        ({"conditions": [{"type": "PodScheduled", "status": "True"}]}, None),
    ],
)
def test_a_pending_pod_reports_its_wait_reason(status: dict[str, Any], waiting: Failure | None) -> None:
    assert seen({"phase": "Pending", **status}).waiting == waiting


def test_a_gated_pod_reports_its_scheduling_gate() -> None:
    held = pod({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False"}]})
    held["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    observed = observed_pod(held)
    assert observed is not None
    assert observed.waiting == Failure("SchedulingGated", "held back by kueue.x-k8s.io/admission")


GPUS = {"name": "gpus", "resourceClaimTemplateName": "two-gpus"}
FABRIC = {"name": "network", "resourceClaimName": "fabric"}
MADE = {"resourceClaimStatuses": [{"name": "gpus", "resourceClaimName": "chat-0-0-0-gpus-x7k2p"}]}
NO_DEVICE = "0/1 nodes are available: 1 cannot allocate all claims."


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({}, "waits for ResourceClaimTemplate two-gpus; check that the namespace has it"),
        (MADE, "waits for ResourceClaim fabric; check that the namespace has it"),
        (
            {**MADE, "conditions": [{"type": "PodScheduled", "status": "False", "message": NO_DEVICE}]},
            NO_DEVICE,
        ),
        ({**MADE, "conditions": [{"type": "PodScheduled", "status": "True"}]}, None),
    ],
)
def test_a_pod_waits_for_its_resource_claims_and_for_their_devices(status: dict[str, Any], words: str | None) -> None:
    claiming = pod({"phase": "Pending", **status})
    claiming["spec"] = {"resourceClaims": [GPUS, FABRIC]}
    observed = observed_pod(claiming)
    assert observed is not None
    assert observed.waiting == (None if words is None else Failure("Unschedulable", words))


def test_an_image_volume_that_can_not_be_pulled_is_named() -> None:
    words = 'Back-off pulling image "registry/model:1"'
    waiting = {"reason": "ImagePullBackOff", "message": words}
    waits = pod({"phase": "Pending", "containerStatuses": [container(waiting=waiting)]})
    waits["spec"]["volumes"] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "m", "image": {"reference": "registry/model:1"}},
    ]
    observed = observed_pod(waits)
    assert observed is not None
    assert observed.waiting == Failure("ImagePull", f"image registry/model:1: {words}")


def test_the_termination_message_of_the_launcher_is_the_failure() -> None:
    words = '{"reason": "RankFailed", "message": "CUDA error", "rank": 1, "exitCode": 1}'
    status = {"phase": "Failed", "containerStatuses": [container(**terminated(1, words, finishedAt=READY_AT))]}
    observed = seen(status)
    assert observed.failure == Failure("RankFailed", "CUDA error", rank=1, exit_code=1)
    assert observed.finished_at == EPOCH + 60


def test_the_failure_of_a_killed_container_has_its_reason() -> None:
    failure = seen({"phase": "Failed", "containerStatuses": [container(**terminated(137, reason="OOMKilled"))]}).failure
    assert failure is not None
    assert (failure.reason, failure.exit_code, "memory" in failure.message) == ("OOMKilled", 137, True)


def test_the_failure_of_the_runtime_container_precedes_that_of_a_sidecar() -> None:
    ended = [container("proxy", **terminated(143)), container(**terminated(1, "no GPU left"))]
    failure = seen({"phase": "Failed", "containerStatuses": ended}).failure
    assert failure == Failure("Error", "no GPU left", exit_code=1)


def test_an_evicted_pod_reports_the_eviction_and_not_its_consequences() -> None:
    ready = {"type": "Ready", "status": "False", "lastTransitionTime": READY_AT}
    status = {"phase": "Failed", "reason": "Evicted", "message": "low on memory", "conditions": [ready]}
    observed = seen(status)
    assert (observed.failure, observed.finished_at) == (Failure("Evicted", "low on memory"), EPOCH + 60)


def test_a_preempted_pod_reports_the_preemption() -> None:
    disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "for a-0"}
    status = {"phase": "Failed", "conditions": [disrupted], "containerStatuses": [container(**terminated(143))]}
    assert seen(status).failure == Failure("PreemptionByScheduler", "for a-0", disruption=True)


@pytest.mark.parametrize(
    ("status", "disrupted"),
    [
        ({"reason": "Preempting", "message": "Preempted in order to admit critical pod"}, True),
        ({"reason": "NodeShutdown", "message": "Pod was rejected as the node is shutting down."}, True),
        ({"reason": "Evicted", "message": "The node was low on resource: memory."}, True),
        ({"reason": "Evicted", "message": "Usage of EmptyDir volume exceeds the limit"}, False),
        ({"reason": "UnexpectedAdmissionError", "message": "no GPU"}, False),
        ({"conditions": [{"type": "DisruptionTarget", "status": "False"}]}, False),
    ],
)
def test_only_evictions_preemptions_and_lost_nodes_are_disruptions(status: dict[str, Any], disrupted: bool) -> None:
    observed = seen({"phase": "Failed", "containerStatuses": [container(**terminated(143))], **status})
    assert observed.failure is not None
    assert (observed.disruption is not None, observed.failure.disruption) == (disrupted, disrupted)


def test_a_running_pod_with_a_disruption_target_is_marked() -> None:
    words = {"reason": "EvictionByEvictionAPI", "message": "Eviction API: evicting"}
    status = {"phase": "Running", "conditions": [{"type": "DisruptionTarget", "status": "True", **words}]}
    observed = seen(status, deletionTimestamp=READY_AT)
    assert observed.disruption == Failure("EvictionByEvictionAPI", "Eviction API: evicting", disruption=True)
    assert observed.failure is None


def test_a_pod_that_failed_without_a_message_is_a_failure() -> None:
    failure = seen({"phase": "Failed"}).failure
    assert failure is not None
    assert failure.reason == "PodFailed"


def test_a_terminating_pod_has_a_deadline() -> None:
    observed = seen({"phase": "Running"}, deletionTimestamp=READY_AT)
    assert (observed.deleting, observed.deletion_deadline) == (True, EPOCH + 60)


def test_a_failed_pod_is_not_ready_with_any_conditions() -> None:
    assert not seen({"phase": "Failed", "conditions": [{"type": "Ready", "status": "True"}]}).ready


def test_paths_follow_the_kubernetes_api() -> None:
    assert path_of("Pod", "ns", "a-0") == "/api/v1/namespaces/ns/pods/a-0"
    assert path_of("Event", "ns") == "/apis/events.k8s.io/v1/namespaces/ns/events"
    assert path_of("MegatronInference", "ns", "x").startswith("/apis/inference.megatron.dev/v1alpha1/namespaces/ns/")


def test_a_rejection_is_distinguished_from_a_failure() -> None:
    words = '{"kind": "Status", "message": "pods \\"a\\" is forbidden: exceeded quota"}'
    with pytest.raises(ServerRefusal, match="exceeded quota"):
        answer_of("POST /pods", 403, words)
    with pytest.raises(ServerError, match="etcd is away") as failed:
        answer_of("GET /pods", 503, "etcd is away")
    assert failed.value.status == 503
    with pytest.raises(ServerError, match="an empty answer"):
        answer_of("GET /pods", 200, "")


def test_a_terminating_namespace_is_distinguished_from_other_rejections() -> None:
    cause = {"reason": "NamespaceTerminating", "message": "namespace lab is being terminated", "field": ""}
    refusal = {"message": "pods is forbidden", "reason": "Forbidden", "code": 403, "details": {"causes": [cause]}}
    with pytest.raises(NamespaceTerminating, match="pods is forbidden"):
        answer_of("POST /pods", 403, json.dumps(refusal))
    for details in (None, {}, {"causes": None}, {"causes": [{"reason": "FieldValueInvalid"}]}):
        with pytest.raises(ServerRefusal):
            answer_of("POST /pods", 403, json.dumps({**refusal, "details": details}))
    assert answer_of("GET /pods", 200, '{"items": []}') == {"items": []}


@pytest.mark.parametrize(
    ("status", "retry_after", "delay"),
    [(429, "2", 2.0), (429, "86400", LONGEST_DELAY), (429, None, None), (429, "soon", None), (200, "2", None)],
)
def test_a_retry_after_header_sets_the_delay(status: int, retry_after: str | None, delay: float | None) -> None:
    assert delay_of(status, retry_after) == delay


def test_an_event_refers_to_the_resource_and_is_truncated() -> None:
    metadata = {"name": "chat", "namespace": "ns", "uid": "u1", "resourceVersion": "7"}
    obj = {"apiVersion": f"{PREFIX}/v1alpha1", "kind": "MegatronInference", "metadata": metadata}
    event = kubernetes_event(obj, Event(EventType.WARNING, "GroupFailed", "x" * 5000))
    assert (event["type"], event["reason"], len(event["note"])) == ("Warning", "GroupFailed", LONGEST_NOTE)
    foreign = kubernetes_event(obj, Event(EventType.WARNING, "GroupFailed", "é€" * 5000))
    assert LONGEST_NOTE - 3 < len(foreign["note"].encode()) <= LONGEST_NOTE
    assert event["regarding"]["uid"] == "u1"
    assert event["metadata"]["name"].startswith("chat.")
    check(event)
