"""The status that a kubelet would write for a simulated pod."""

from __future__ import annotations

from typing import Any

from megatron_operator.local.pod_status import PodStatus
from megatron_operator.observed_state import PodPhase
from megatron_operator.timestamps import timestamp


def kubelet_status(pod: PodStatus, container: str) -> dict[str, Any]:
    """The ``status`` of a Pod object."""
    ready = {"type": "Ready", "status": "True" if pod.ready else "False"}
    return {
        "phase": str(pod.phase),
        "podIP": pod.address,
        "podIPs": [{"ip": pod.address}],
        "hostIP": "127.0.0.1",
        "conditions": [ready, {**ready, "type": "ContainersReady"}],
        "containerStatuses": [
            {
                "name": container,
                "image": "",
                "imageID": "",
                "ready": pod.ready,
                "restartCount": 0,
                "started": pod.phase is PodPhase.RUNNING,
                "state": _container_state(pod),
            }
        ],
    }


def _container_state(pod: PodStatus) -> dict[str, Any]:
    if pod.finished:
        ended = {"startedAt": _time(pod.started_at), "finishedAt": _time(pod.finished_at)}
        code = pod.exit_code if pod.exit_code is not None else 128
        return {"terminated": {"exitCode": code, "reason": pod.reason, "message": pod.message, **ended}}
    if pod.started_at is None:
        return {"waiting": {"reason": "ContainerCreating"}}
    return {"running": {"startedAt": _time(pod.started_at)}}


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else timestamp(seconds)
