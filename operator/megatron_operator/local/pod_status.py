"""What the kubelet would report of a pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
