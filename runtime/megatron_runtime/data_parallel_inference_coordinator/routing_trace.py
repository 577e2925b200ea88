"""Records which engine each request is routed to."""

from __future__ import annotations

import json

MAX_RECORDS = 1_000_000


class RoutingTrace:
    """The routing decisions in order; empty unless they are recorded."""

    def __init__(self, policy: str, data_parallel_size: int, *, is_recorded: bool) -> None:
        self._policy = policy
        self._data_parallel_size = data_parallel_size
        self._is_recorded = is_recorded
        self._records: list[dict[str, int]] = []

    def record(self, request_id: int, rank_index: int, num_hashes: int) -> None:
        """Record that ``request_id`` (the coordinator's number) goes to the engine of replica group ``rank_index``."""
        if self._is_recorded and len(self._records) < MAX_RECORDS:
            self._records.append({"request_id": request_id, "rank_index": rank_index, "num_hashes": num_hashes})

    def text(self) -> str:
        """The records as JSON with the fields that Megatron writes; empty without records."""
        if not self._records:
            return ""
        content = {
            "policy": self._policy,
            "data_parallel_size": self._data_parallel_size,
            "num_requests": len(self._records),
            "records": self._records,
        }
        return json.dumps(content, indent=2) + "\n"
