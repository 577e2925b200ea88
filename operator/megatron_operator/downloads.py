"""What is observed of the Jobs that fill a model cache."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class DownloadPhase(StrEnum):
    """State of a download Job."""

    PENDING = "Pending"
    RUNNING = "Running"
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True)
class ObservedDownload:
    """One download Job. Bytes are 0 and ``commit`` is empty until they are known."""

    job: str
    phase: DownloadPhase
    loaded_bytes: int = 0
    total_bytes: int = 0
    commit: str = ""
    message: str = ""
    """Why it waits or has failed, or why its last attempt did."""
    failed_at: float | None = None
    """When it failed for good, in seconds since the epoch."""
    outlives_resource: bool = False
    """Whether it is the record of a model in a shared cache, which only an eviction ends."""

    @classmethod
    def completed(cls, job: str, told: str | None) -> Self:
        """A download that has succeeded, with what it wrote into its termination message."""
        try:
            found = json.loads(told or "")
            size, commit = int(found["bytes"]), str(found.get("commit") or "")
        except (ValueError, TypeError, KeyError):
            size, commit = 0, ""
        return cls(job, DownloadPhase.COMPLETE, size, size, commit)
