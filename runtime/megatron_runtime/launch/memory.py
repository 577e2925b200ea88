"""The memory and the cores that this pod may use: those of the machine, or the limits of its cgroup."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megatron_runtime.launch.quantity import format_bytes

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class AvailableMemory:
    """Available bytes, and the origin of the limit."""

    count: int
    source: str

    def __str__(self) -> str:
        return f"{format_bytes(self.count)} ({self.source})"


def available_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> AvailableMemory:
    """The minimum of the available memory of the machine and of the cgroup (version 2 or 1)."""
    limits = [AvailableMemory(_machine(meminfo), "free on this machine")]
    for limit_file, usage_file, statistics, reclaimable in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        limit, usage = _integer(cgroup / limit_file), _integer(cgroup / usage_file)
        if limit is not None and usage is not None:
            cached = _statistic(cgroup / statistics, reclaimable)
            limits.append(AvailableMemory(max(limit - usage + cached, 0), "left of the container's limit"))
    return min(limits, key=lambda limit: limit.count)


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process may run on, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        cores = min(cores, int(int(quota) / int(period)))
    except (OSError, ValueError):
        pass  # no cgroup, or its limit is "max"
    return max(cores, 1)


def _machine(meminfo: Path) -> int:
    return _statistic(meminfo, "MemAvailable:") * 1024


def _integer(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
