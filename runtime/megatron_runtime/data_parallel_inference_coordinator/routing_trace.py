"""Records which engine each request went to, and writes it down at the end."""

from __future__ import annotations

import json
from pathlib import Path

MOST_RECORDS = 1_000_000


class RoutingTrace:
    """The routing decisions in order; nothing is kept when no path is given."""

    def __init__(self, path: str | None, policy: str, data_parallel_size: int) -> None:
        self._path = path
        self._policy = policy
        self._data_parallel_size = data_parallel_size
        self._records: list[dict[str, int]] = []

    def record(self, request_id: int, rank_index: int, num_hashes: int) -> None:
        """Request ``request_id`` (the coordinator's number) went to the engine of group ``rank_index``."""
        if self._path is not None and len(self._records) < MOST_RECORDS:
            self._records.append({"request_id": request_id, "rank_index": rank_index, "num_hashes": num_hashes})

    def write(self) -> None:
        """Write the JSON file, if there is a path and at least one record."""
        if self._path is None or not self._records:
            return
        content = {
            "policy": self._policy,
            "data_parallel_size": self._data_parallel_size,
            "num_requests": len(self._records),
            "records": self._records,
        }
        Path(self._path).write_text(json.dumps(content, indent=2) + "\n")
