"""Wait reasons: what a replica group waits for, as the reason and message of a condition."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_operator.api.v1alpha1 import CachePhase
from megatron_operator.observed_state import RANK_PHASES, Loading, ObservedPod, PodPhase
from megatron_operator.replica_groups import GANG_TIMEOUT, ReplicaGroupFailure, ReplicaGroupState, pod_is_ready
from megatron_operator.restarts import RESTART_BUDGET_EXCEEDED, GiveUp, Retry
from megatron_operator.status_inputs import ReplicaGroupView, StatusInputs
from megatron_operator.timestamps import soon

MEBIBYTE = 2**20
CACHE_FAILED = "CacheFailed"


@dataclass(frozen=True)
class WaitReason:
    """A condition's reason and message."""

    reason: str
    message: str


def wait_reason(view: ReplicaGroupView, inputs: StatusInputs) -> WaitReason:
    """What a group that is not ready waits for."""
    index = view.group.index
    if not inputs.cache.is_filled and not view.group.pods:
        return cache_reason(inputs)
    match view.state:
        case ReplicaGroupState.ABSENT:
            return WaitReason("Pending", f"replica group {index}: its pods are being created")
        case ReplicaGroupState.LEAVING:
            pods = ", ".join(pod.name for pod in view.group.pods)
            words = f"replica group {index}: waiting for {pods} to end before the next attempt{_cause(view.group.pods)}"
            return WaitReason("Replacing", words)
        case ReplicaGroupState.FAILED:
            return _after_failure(view, inputs)
        case _:
            waiting = [pod for pod in view.group.pods if not pod_is_ready(pod)]
            if not waiting:
                return WaitReason(
                    "Pending", f"replica group {index}: {len(view.group.missing)} more pods are being created"
                )
            return _of_pod(min(waiting, key=_progress))


def cache_reason(inputs: StatusInputs) -> WaitReason:
    """The state of the model cache."""
    status = inputs.cache.status
    assert status is not None
    said = f": {status.message}" if status.message else ""
    megabytes = f"{status.downloaded_bytes / MEBIBYTE:.0f} of {status.total_bytes / MEBIBYTE:.0f} MiB"
    done = f"; {status.filled_nodes} of {status.nodes} nodes are done" if status.nodes else ""
    match status.phase:
        case CachePhase.READY:
            where = f" on {status.filled_nodes} of {status.nodes} nodes" if status.nodes else ""
            return WaitReason("CacheFilled", f"the model cache is filled{where}{said}")
        case CachePhase.FAILED:
            again = "the operator tries again 10 minutes after the failure, or when the Job is deleted"
            return WaitReason(CACHE_FAILED, f"the model cache could not be filled{said}; {again}")
        case CachePhase.DOWNLOADING:
            return WaitReason("CacheDownloading", f"the model is downloaded into the cache, {megabytes}{done}{said}")
        case CachePhase.VERIFYING:
            return WaitReason("CacheVerifying", f"the checksums of {megabytes} in the cache are compared{done}{said}")
        case _:
            words = "the model cache waits for its download to start"
            return WaitReason("CachePending", f"{words}{done}{said}")


def _of_failure(failed: ReplicaGroupFailure) -> str:
    """A failure as text: pod, rank, exit code and termination message."""
    failure = failed.failure
    rank = "" if failure.rank is None else f" rank {failure.rank}"
    code = "" if failure.exit_code is None else f" (exit code {failure.exit_code})"
    return f"{failed.pod}{rank}: {failure.reason}{code}: {failure.message}"


def _cause(pods: Iterable[ObservedPod]) -> str:
    """Why the cluster ends the pods; empty when it does not, or does not say."""
    causes = [pod.disruption for pod in pods if pod.disruption is not None]
    return f"; {causes[0].reason}: {causes[0].message}" if causes else ""


def _after_failure(view: ReplicaGroupView, inputs: StatusInputs) -> WaitReason:
    assert view.failed is not None
    index, limit = view.group.index, inputs.policy.max_restarts
    words = f"replica group {index} failed: {_of_failure(view.failed)}"
    match view.decision:
        case GiveUp(reason=reason) if reason == RESTART_BUDGET_EXCEEDED:
            fix = "fix the cause, then change restart.id or another part of the spec"
            return WaitReason(reason, f"{words}; all {limit} restarts are used up: {fix}")
        case GiveUp(reason=reason):
            return WaitReason(reason, f"{words}; no further attempt until the spec changes")
        case Retry(at=at) if view.failed.failure.reason == GANG_TIMEOUT:
            start = "now" if at <= inputs.observed.now else f"at {soon(at, inputs.observed.now)}"
            cause = f"replica group {index}: {view.failed.pod} {view.failed.failure.message}"
            return WaitReason(GANG_TIMEOUT, f"{cause}; the next attempt starts {start}")
        case Retry(at=at, is_counted=False):
            start = "now" if at <= inputs.observed.now else f"at {soon(at, inputs.observed.now)}"
            return WaitReason(
                "Disrupted", f"{words}; the cluster ended the pod, so the restart does not count; it starts {start}"
            )
        case Retry(restarts=0):
            return WaitReason("Restarting", f"{words}; restarted with the changed spec")
        case Retry(at=at) if at <= inputs.observed.now:
            return WaitReason("Restarting", f"{words}; the next attempt starts now")
        case Retry(at=at, restarts=restarts):
            return WaitReason("BackOff", f"{words}; restart {restarts} of {limit} at {soon(at, inputs.observed.now)}")
    raise AssertionError("a failed group has a restart decision")


def _progress(pod: ObservedPod) -> tuple[bool, bool, int]:
    """Progress of a pod's start. The other pods of its group wait for the slowest."""
    phase = RANK_PHASES.index(pod.rank_phase) if pod.rank_phase in RANK_PHASES else -1
    return pod.waiting is None, pod.phase is PodPhase.RUNNING, phase


def _of_pod(pod: ObservedPod) -> WaitReason:
    if pod.waiting is not None:
        return WaitReason(pod.waiting.reason, f"{pod.name} cannot start: {pod.waiting.message}")
    if pod.phase is not PodPhase.RUNNING:
        return WaitReason("Pending", f"{pod.name} is {pod.phase}: waiting for a node, its volumes and its image")
    match pod.rank_phase:
        case "Loading":
            return WaitReason("ModelLoading", f"{pod.name} loads the weights{_share(pod.loading)}")
        case "Rendezvous":
            return WaitReason("Rendezvous", f"{pod.name} waits for the other ranks of its group")
        case "Registering":
            return WaitReason("Registering", f"{pod.name} registers with the coordinator")
        case "Serving":
            return WaitReason("Starting", f"{pod.name} has its model; waiting for its readiness probe")
        case "Exited":
            return WaitReason("RankExited", f"a rank of {pod.name} has ended; its launcher is restarting it")
        case _:
            return WaitReason("Starting", f"{pod.name} has started; its ranks are not up yet")


def _share(loading: Loading | None) -> str:
    """In steps of ten per cent, to limit the number of status updates."""
    if loading is None or loading.total_bytes == 0:
        return ""
    tenths = 10 * loading.loaded_bytes // loading.total_bytes
    return f": {10 * tenths} % of {loading.total_bytes / MEBIBYTE:.0f} MiB"
