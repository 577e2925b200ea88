"""The lines of a pod's log, with their times, so that the logs of several pods can be merged."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_operator import names
from megatron_operator.kubernetes.user_cluster import UserCluster, core_path
from megatron_operator.timestamps import seconds, timestamp

RANK_PREFIX = re.compile(r"\[rank (\d+)\] ")


@dataclass(frozen=True, order=True)
class LogLine:
    """``time`` is the kubelet's timestamp, in seconds since the epoch."""

    time: float
    pod: str
    text: str

    def is_of(self, rank: int) -> bool:
        """Whether that rank wrote the line; the launcher prefixes the lines of ranks."""
        found = RANK_PREFIX.match(self.text)
        return found is not None and int(found[1]) == rank


async def read_lines(
    cluster: UserCluster, namespace: str, pod: str, query: Mapping[str, str], *, after: float = 0.0
) -> AsyncIterator[LogLine]:
    """Lines newer than ``after``; with ``follow`` in the query, also new ones. Raises AdapterError."""
    asked = {"container": names.CONTAINER, "timestamps": "true", **query}
    if after:
        # The API takes whole seconds; lines that were read already are skipped here.
        asked["sinceTime"] = timestamp(int(after))
    async with cluster.stream("GET", f"{core_path(namespace, 'pods', pod)}/log", asked) as answer:
        buffered = b""
        async for part in answer.content.iter_any():
            *whole, buffered = (buffered + part).split(b"\n")
            for each in whole:
                if (line := _parsed(pod, each)).time > after:
                    yield line
        if buffered and (line := _parsed(pod, buffered)).time > after:
            yield line


def has_started(pod: Mapping[str, Any]) -> bool:
    """Whether the container has started, so that it has a log."""
    status = pod.get("status") or {}
    containers = [each for each in status.get("containerStatuses") or [] if each.get("name") == names.CONTAINER]
    return any(kind in (each.get("state") or {}) for each in containers for kind in ("running", "terminated"))


def _parsed(pod: str, line: bytes) -> LogLine:
    time, _, text = line.decode(errors="replace").partition(" ")
    try:
        return LogLine(seconds(time), pod, text)
    except ValueError:
        # The kubelet's own messages between the lines, such as about a rotated file, have no time.
        return LogLine(float("inf"), pod, line.decode(errors="replace"))
