"""The status of a pod, as a kubelet would report it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_operator.observed_state import PodPhase


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
    """Process id of the container's first process; also the id of its process group and session."""
    started_at: float | None = None
    finished_at: float | None = None
    exit_code: int | None = None
    """Exit code as a shell reports it: 128 plus the signal's number for a killed process."""
    reason: str = ""
    """CamelCase: Completed, Error, StartError, Unhealthy."""
    message: str = ""
    """The container's termination message, or the end of its log."""
    ready_changed_at: float | None = None
    deletion_deadline: float | None = None
    """Time at which a pod that is being deleted is killed; None for other pods."""

    @property
    def deleting(self) -> bool:
        """Whether its deletion was requested."""
        return self.deletion_deadline is not None

    @property
    def finished(self) -> bool:
        """Whether the container has ended or could not start."""
        return self.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)
