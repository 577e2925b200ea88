"""The exit code of a launcher, and the reason in its termination log."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_runtime.processes.parent_link import EXIT_BAD_INPUT, EXIT_DRAINED, EXIT_FAILURE
from megatron_runtime.processes.supervisor import ChildEnd

logger = logging.getLogger(__name__)

LOST_RANK = "LostRank"
"""A rank of this pod ended because another one, perhaps in another pod, was lost or late."""
LONGEST_MESSAGE = 3000
"""Most characters of a message; the kubelet keeps 4096 bytes of the termination log."""


@dataclass(frozen=True)
class Outcome:
    """Why the launcher ended. ``reason`` is CamelCase, as in Kubernetes conditions."""

    exit_code: int = EXIT_DRAINED
    reason: str = "Drained"
    message: str = ""
    rank: int | None = None
    child_exit_code: int | None = None

    @classmethod
    def bad_input(cls, error: Exception) -> Outcome:
        """The options or the checkpoint are invalid; a restart would fail again."""
        kind = type(error).__name__
        return cls(EXIT_BAD_INPUT, "InvalidSpec" if kind == "ConfigurationError" else kind, str(error))

    @classmethod
    def child_failed(cls, end: ChildEnd, rank: int | None = None) -> Outcome:
        """A required process ended and is not restarted."""
        if end.is_bad_input:
            reason = "CheckpointError" if (end.error or {}).get("reason") == "CheckpointError" else "InvalidSpec"
            return cls(EXIT_BAD_INPUT, reason, end.message, rank, end.exit_code)
        if end.error is not None and end.is_consequence:
            missing = end.error.get("missing") or [rank]
            return cls(EXIT_FAILURE, LOST_RANK, end.message, missing[0])
        reason = "ProcessFailed" if rank is None else "RankFailed"
        return cls(EXIT_FAILURE, reason, end.message, rank, end.exit_code)

    def body(self) -> dict[str, Any]:
        """The JSON of the termination log and the control API."""
        return {
            "reason": self.reason,
            "message": self.message[-LONGEST_MESSAGE:],
            "rank": self.rank,
            "exitCode": self.exit_code if self.child_exit_code is None else self.child_exit_code,
        }

    def write(self, path: Path | None) -> None:
        """Writes the termination log, if there is one, unless the launcher was drained."""
        if path is None or self.exit_code == EXIT_DRAINED:
            return
        try:
            path.write_text(json.dumps(self.body()) + "\n")
        except OSError as error:
            logger.warning("the termination log %s can't be written: %s", path, error)
