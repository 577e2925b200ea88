"""What the kubelet would report of a pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_operator.timestamps import timestamp
from megatron_operator.world import PodPhase


@dataclass(frozen=True)
class PodStatus:
    """One pod at one moment. Times are seconds since the epoch."""

    name: str
    namespace: str
    uid: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    phase: PodPhase
    ready: bool
    address: str
    created_at: float
    log: Path
    """Standard output and error of the container."""
    pid: int | None = None
    """Of the container's first process, which is also the id of its process group and session."""
    started_at: float | None = None
    finished_at: float | None = None
    exit_code: int | None = None
    """As a shell gives it: 128 plus the signal's number for a killed process."""
    reason: str = ""
    """CamelCase: Completed, Error, StartError, Unhealthy."""
    message: str = ""
    """The container's termination message, or the end of its log."""
    ready_changed_at: float | None = None
    deletion_deadline: float | None = None
    """Set once deletion was asked for: when the process is killed at the latest."""

    @property
    def deleting(self) -> bool:
        """True once deletion was asked for."""
        return self.deletion_deadline is not None

    @property
    def finished(self) -> bool:
        """True when the container has ended or could not be started."""
        return self.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)

    def as_kubernetes(self, container: str = "main") -> dict[str, Any]:
        """The ``status`` of a Pod object, for an API server whose kubelet is played by processes."""
        ready = {"type": "Ready", "status": "True" if self.ready else "False"}
        return {
            "phase": str(self.phase),
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "hostIP": "127.0.0.1",
            "conditions": [ready, {**ready, "type": "ContainersReady"}],
            "containerStatuses": [
                {
                    "name": container,
                    "image": "",
                    "imageID": "",
                    "ready": self.ready,
                    "restartCount": 0,
                    "started": self.phase is PodPhase.RUNNING,
                    "state": self._container_state(),
                }
            ],
        }

    def _container_state(self) -> dict[str, Any]:
        if self.finished:
            ended = {"startedAt": _time(self.started_at), "finishedAt": _time(self.finished_at)}
            code = self.exit_code if self.exit_code is not None else 128
            return {"terminated": {"exitCode": code, "reason": self.reason, "message": self.message, **ended}}
        if self.started_at is None:
            return {"waiting": {"reason": "ContainerCreating"}}
        return {"running": {"startedAt": _time(self.started_at)}}


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else timestamp(seconds)
