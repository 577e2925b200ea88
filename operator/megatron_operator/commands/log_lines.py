"""The lines of one pod's log, with their times, so that those of several pods can be put in order."""

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
    """``time`` is seconds since the epoch, as the kubelet noted it."""

    time: float
    pod: str
    text: str

    def is_of(self, rank: int) -> bool:
        """Whether that rank wrote it; the launcher puts the rank before each line of one."""
        found = RANK_PREFIX.match(self.text)
        return found is not None and int(found[1]) == rank


async def read_lines(
    cluster: UserCluster, namespace: str, pod: str, query: Mapping[str, str], *, after: float = 0.0
) -> AsyncIterator[LogLine]:
    """The lines later than ``after``; with ``follow`` in the query also those to come. Raises WorldError."""
    asked = {"container": names.CONTAINER, "timestamps": "true", **query}
    if after:
        # The API knows whole seconds alone: what was read already is left out here.
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
    """Whether the container has run, so that there is a log."""
    status = pod.get("status") or {}
    containers = [each for each in status.get("containerStatuses") or [] if each.get("name") == names.CONTAINER]
    return any(kind in (each.get("state") or {}) for each in containers for kind in ("running", "terminated"))


def _parsed(pod: str, line: bytes) -> LogLine:
    time, _, text = line.decode(errors="replace").partition(" ")
    try:
        return LogLine(seconds(time), pod, text)
    except ValueError:
        # A kubelet's complaint amid the lines, such as about a rotated file, has no time.
        return LogLine(float("inf"), pod, line.decode(errors="replace"))
