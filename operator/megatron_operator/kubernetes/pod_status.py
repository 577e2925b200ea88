"""Converts a Pod object of the API server to an ``ObservedPod``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron_operator import kueue, names
from megatron_operator.failures import read_failure
from megatron_operator.observed_state import Failure, ObservedPod, PodPhase
from megatron_operator.replica_groups import SCHEDULING_GATED, UNSCHEDULABLE
from megatron_operator.timestamps import seconds

IMAGE_PULL = "ImagePull"
IMAGE_REASONS = (
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "ImageInspectError",
    "RegistryUnavailable",
)
EVICTED = "Evicted"
LOW_ON_RESOURCE = "The node was low on resource"
"""Start of the kubelet's message when it evicts a pod for the node's sake."""
NODE_REASONS = ("NodeLost", "NodeShutdown", "Preempting", "Shutdown", "Terminated")
"""Reasons of pods that ended because of their node, or for a pod with a higher priority."""
NORMAL_REASONS = ("ContainerCreating", "PodInitializing")
"""Reasons that every starting pod has."""

Object = Mapping[str, Any]


def observed_pod(pod: Object) -> ObservedPod | None:
    """None for a pod without the operator's labels."""
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    identity = names.pod_identity(metadata)
    if identity is None:
        return None
    phase = _phase(status)
    ready = _condition(status, "Ready")
    deletion = metadata.get("deletionTimestamp")
    return ObservedPod(
        name=metadata["name"],
        uid=metadata["uid"],
        group=identity.group,
        attempt=identity.attempt,
        index=identity.index,
        leader=identity.leader,
        template_hash=identity.template_hash,
        phase=phase,
        ready=phase is PodPhase.RUNNING and ready.get("status") == "True",
        created_at=seconds(metadata["creationTimestamp"]),
        default_image=(metadata.get("annotations") or {}).get(names.DEFAULT_IMAGE_ANNOTATION),
        cached_source=(metadata.get("annotations") or {}).get(names.CACHED_SOURCE_ANNOTATION),
        restarts=identity.restarts,
        epoch=identity.epoch,
        address=status.get("podIP") or None,
        node=spec.get("nodeName"),
        startup_since=_startup_since(metadata, spec, status),
        ready_changed_at=_time(ready.get("lastTransitionTime")),
        finished_at=_finished_at(status) if phase in (PodPhase.FAILED, PodPhase.SUCCEEDED) else None,
        # The API server sets this to the time by which the object should be gone, including the grace period.
        deletion_deadline=_time(deletion),
        workload=_workload(metadata),
        waiting=_waiting(pod) if phase is PodPhase.PENDING else None,
        failure=_failure(status) if phase is PodPhase.FAILED else None,
        disruption=_disruption(status),
    )


def download_failure(pod: Object) -> str:
    """Why a pod of a download Job has failed; empty for other pods."""
    status = pod.get("status") or {}
    return _failure(status).message if status.get("phase") == PodPhase.FAILED else ""


def download_message(pod: Object) -> str:
    """Why a pod of a download Job does not start; empty for other pods."""
    waiting = _waiting(pod)
    return "" if waiting is None else f"{waiting.reason}: {waiting.message}"


def _phase(status: Object) -> PodPhase:
    try:
        return PodPhase(status.get("phase") or PodPhase.PENDING)
    except ValueError:
        return PodPhase.UNKNOWN


def _startup_since(metadata: Object, spec: Object, status: Object) -> float | None:
    """When the pod was scheduled, or its last init container ended, or its containers started; None before that.

    A pod that was just bound has no other condition than PodScheduled; its kubelet adds Ready later.
    """
    if not spec.get("nodeName"):
        return None
    scheduled = _condition(status, "PodScheduled")
    bound = _time(scheduled.get("lastTransitionTime")) or seconds(metadata["creationTimestamp"])
    ended = _times(status.get("initContainerStatuses"), "terminated", "finishedAt")
    started = _times(status.get("containerStatuses"), "running", "startedAt")
    return max((bound, *ended, *started))


def _times(containers: Iterable[Object] | None, state: str, field: str) -> list[float]:
    """A time of each container that is in this state."""
    states = [(container.get("state") or {}).get(state) or {} for container in containers or []]
    return [time for each in states if (time := _time(each.get(field))) is not None]


def _workload(metadata: Object) -> str | None:
    """Kueue's Workload whose end or deletion removes the pod's finalizer."""
    if kueue.MANAGED not in (metadata.get("finalizers") or []):
        return None
    return (metadata.get("labels") or {}).get(kueue.GROUP_LABEL)


def _waiting(pod: Object) -> Failure | None:
    """Why the pod cannot start; None while it starts normally."""
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    scheduled = _condition(status, "PodScheduled")
    gates = [gate["name"] for gate in spec.get("schedulingGates") or []]
    if gates or scheduled.get("reason") == SCHEDULING_GATED:
        words = _held_back(pod["metadata"], gates) or scheduled.get("message") or "no node fits"
        return Failure(SCHEDULING_GATED, words)
    if scheduled.get("status") == "False":
        return Failure(scheduled.get("reason") or UNSCHEDULABLE, scheduled.get("message") or "no node fits")
    if not scheduled and (claims := _absent_claims(spec, status)):
        return Failure(UNSCHEDULABLE, f"waits for {', '.join(claims)}; check that the namespace has it")
    for container in _containers(status):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason") or ""
        if not reason or reason in NORMAL_REASONS:
            continue
        words = waiting.get("message") or f"container {container.get('name')} waits: {reason}"
        if reason in IMAGE_REASONS:
            return Failure(IMAGE_PULL, f"image {_image_of(container, spec, words)}: {words}")
        return Failure(reason, words)
    return None


def _held_back(metadata: Object, gates: Sequence[str]) -> str:
    """What a pod with these scheduling gates waits for; empty when it is unknown."""
    labels = metadata.get("labels") or {}
    if kueue.MANAGED in labels and (not gates or not {kueue.ADMISSION_GATE, kueue.TOPOLOGY_GATE}.isdisjoint(gates)):
        workload = f"Workload {labels.get(kueue.GROUP_LABEL)} of LocalQueue {labels.get(kueue.QUEUE_LABEL)}"
        if gates and kueue.ADMISSION_GATE not in gates:
            return f"Kueue has admitted {workload}, but not assigned its topology domain yet"
        return f"Kueue has not admitted {workload} yet"
    return f"held back by {', '.join(gates)}" if gates else ""


def _absent_claims(spec: Object, status: Object) -> list[str]:
    """Resource claims without which the scheduler does not consider the pod, and may say nothing about it.

    The pod's status has the claims that were made from templates, not whether a claim that it names exists.
    """
    made = {each.get("name") for each in status.get("resourceClaimStatuses") or []}
    claims = [each for each in spec.get("resourceClaims") or [] if each["name"] not in made]
    templates = [each["resourceClaimTemplateName"] for each in claims if each.get("resourceClaimTemplateName")]
    named = [each["resourceClaimName"] for each in claims if each.get("resourceClaimName")]
    return [f"ResourceClaimTemplate {name}" for name in templates] or [f"ResourceClaim {name}" for name in named]


def _image_of(container: Object, spec: Object, words: str) -> str:
    """The image that cannot be pulled: the container's, unless the message names an image volume."""
    volumes = [(volume.get("image") or {}).get("reference") for volume in spec.get("volumes") or []]
    return str(next((image for image in volumes if image and image in words), container.get("image")))


def _failure(status: Object) -> Failure:
    """The pod's own reason (evicted, lost) takes precedence over the reason of its container, which follows from it."""
    if (disruption := _disruption(status)) is not None:
        return disruption
    ended = _first_to_end(status)
    if status.get("reason"):
        return Failure(status["reason"], status.get("message") or "the cluster ended the pod")
    if ended is None:
        return Failure("PodFailed", status.get("message") or "the pod failed without a reason")
    return read_failure(ended.get("exitCode"), ended.get("reason") or "", (ended.get("message") or "").strip())


def _disruption(status: Object) -> Failure | None:
    """Why the cluster ends or has ended the pod; None for other pods.

    Since 1.26 Kubernetes sets the condition DisruptionTarget, but not for a pod that is evicted because it exceeded a
    limit of its own. Older versions have the reasons only. Kueue sets a condition of its own.
    """
    reason, message = status.get("reason") or "", status.get("message") or ""
    conditions = [_condition(status, kind) for kind in ("DisruptionTarget", kueue.TERMINATION_TARGET)]
    condition = next((each for each in conditions if each.get("status") == "True"), {})
    is_target = bool(condition)
    low_on_resource = reason == EVICTED and message.startswith(LOW_ON_RESOURCE)
    if not (is_target or low_on_resource or reason in NODE_REASONS):
        return None
    words = message or condition.get("message") or "the cluster ended the pod"
    return Failure(reason or condition.get("reason") or "Disrupted", words, disruption=True)


def _first_to_end(status: Object) -> Object | None:
    """The ``terminated`` state that explains the failure: of the main container, else of the first that failed."""
    failed = [(name, state) for name, state in _terminated(status) if state.get("exitCode") != 0]
    ours = [state for name, state in failed if name == names.CONTAINER]
    return next(iter([*ours, *(state for _, state in failed)]), None)


def _finished_at(status: Object) -> float | None:
    """When the last container ended; without that, when the pod last became unready."""
    ends = [end for _, state in _terminated(status) if (end := _time(state.get("finishedAt"))) is not None]
    return max(ends) if ends else _time(_condition(status, "Ready").get("lastTransitionTime"))


def _terminated(status: Object) -> Iterator[tuple[str | None, Object]]:
    """Name and ``terminated`` state of every ended container."""
    for container in _containers(status):
        if (state := (container.get("state") or {}).get("terminated")) is not None:
            yield container.get("name"), state


def _containers(status: Object) -> Iterator[Object]:
    yield from status.get("initContainerStatuses") or []
    yield from status.get("containerStatuses") or []


def _condition(status: Object, kind: str) -> Object:
    conditions: Iterable[Object] = status.get("conditions") or []
    return next((condition for condition in conditions if condition.get("type") == kind), {})


def _time(text: str | None) -> float | None:
    return seconds(text) if text else None
