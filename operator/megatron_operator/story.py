"""Words for people: what a group waits for, and why."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_operator.groups import GroupFailure, Standing, pod_is_ready
from megatron_operator.picture import GroupView, Picture
from megatron_operator.restarts import RESTART_BUDGET_EXCEEDED, GiveUp, Retry
from megatron_operator.timestamps import time_of_day
from megatron_operator.world import RANK_PHASES, Loading, ObservedPod, PodPhase

MEBIBYTE = 2**20


@dataclass(frozen=True)
class Cause:
    """A condition's reason and message."""

    reason: str
    message: str


def why_not_ready(view: GroupView, picture: Picture) -> Cause:
    """What an unready group waits for."""
    index = view.group.index
    match view.standing:
        case Standing.ABSENT:
            return Cause("Pending", f"group {index}: its pods are about to be created")
        case Standing.LEAVING:
            pods = ", ".join(pod.name for pod in view.group.pods)
            return Cause("Replacing", f"group {index}: waiting for {pods} to end before the next attempt")
        case Standing.FAILED:
            return _after_failure(view, picture)
        case _:
            waiting = [pod for pod in view.group.pods if not pod_is_ready(pod)]
            if not waiting:
                return Cause("Pending", f"group {index}: {len(view.group.missing)} more pods are about to be created")
            return _of_pod(min(waiting, key=_progress))


def _of_failure(failed: GroupFailure) -> str:
    """A failure in words: which pod, rank and exit code, and the last words."""
    failure = failed.failure
    rank = "" if failure.rank is None else f" rank {failure.rank}"
    code = "" if failure.exit_code is None else f" (exit code {failure.exit_code})"
    return f"{failed.pod}{rank}: {failure.reason}{code}: {failure.message}"


def _after_failure(view: GroupView, picture: Picture) -> Cause:
    assert view.failed is not None
    index, limit = view.group.index, picture.policy.max_restarts
    words = f"group {index} failed: {_of_failure(view.failed)}"
    match view.outlook:
        case GiveUp(reason=reason) if reason == RESTART_BUDGET_EXCEEDED:
            mend = "mend the cause, then change restart.id or another part of the spec"
            return Cause(reason, f"{words}; all {limit} restarts are used up: {mend}")
        case GiveUp(reason=reason):
            return Cause(reason, f"{words}; not tried again until the spec changes")
        case Retry(restarts=0):
            return Cause("Restarting", f"{words}; started again with the changed spec")
        case Retry(at=at) if at <= picture.world.now:
            return Cause("Restarting", f"{words}; the next attempt starts now")
        case Retry(at=at, restarts=restarts):
            return Cause("BackOff", f"{words}; restart {restarts} of {limit} at {time_of_day(at)}")
    raise AssertionError("a failed group has an outlook")


def _progress(pod: ObservedPod) -> tuple[bool, bool, int]:
    """How far a pod has come; the others of its group wait for the last one."""
    phase = RANK_PHASES.index(pod.rank_phase) if pod.rank_phase in RANK_PHASES else -1
    return pod.waiting is None, pod.phase is PodPhase.RUNNING, phase


def _of_pod(pod: ObservedPod) -> Cause:
    if pod.waiting is not None:
        return Cause(pod.waiting.reason, f"{pod.name} cannot start: {pod.waiting.message}")
    if pod.phase is not PodPhase.RUNNING:
        return Cause("Pending", f"{pod.name} is {pod.phase}: waiting for a node, its volumes and its image")
    match pod.rank_phase:
        case "Loading":
            return Cause("ModelLoading", f"{pod.name} loads the weights{_share(pod.loading)}")
        case "Rendezvous":
            return Cause("Rendezvous", f"{pod.name} waits for the other ranks of its group")
        case "Registering":
            return Cause("Registering", f"{pod.name} registers with the coordinator")
        case "Serving":
            return Cause("Starting", f"{pod.name} has its model; waiting for its readiness probe")
        case "Exited":
            return Cause("RankExited", f"a rank of {pod.name} has ended; its launcher is restarting it")
        case _:
            return Cause("Starting", f"{pod.name} has started; its ranks are not up yet")


def _share(loading: Loading | None) -> str:
    """In steps of ten per cent, so that a status is not written for every megabyte."""
    if loading is None or loading.total_bytes == 0:
        return ""
    tenths = 10 * loading.loaded_bytes // loading.total_bytes
    return f": {10 * tenths} % of {loading.total_bytes / MEBIBYTE:.0f} MiB"
