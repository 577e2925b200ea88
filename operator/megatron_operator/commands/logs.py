"""``logs``: the logs of all ranks of a resource, sorted by time."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from megatron_operator import names
from megatron_operator.api.quantity import Duration
from megatron_operator.commands.console import say
from megatron_operator.commands.errors import CommandRefused, existing, in_words
from megatron_operator.commands.log_lines import LogLine, has_started, read_lines
from megatron_operator.kubernetes.api_server import Json
from megatron_operator.kubernetes.user_cluster import UserCluster, core_path
from megatron_operator.observed_state import AdapterError, PodPhase

POD_STYLES = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")
LOOK = 1.0
"""Seconds between lists of new pods, and before an interrupted log is read again."""
PODS = "the list of pods"
FINISHED = (PodPhase.SUCCEEDED, PodPhase.FAILED)


@dataclass(frozen=True)
class LogRequest:
    """Which lines to print; None means no limit. ``tail`` counts lines per pod."""

    name: str
    follow: bool = False
    group: int | None = None
    rank: int | None = None
    since: str | None = None
    tail: int | None = None

    def query(self) -> Mapping[str, str]:
        """Limits that the kubelet can apply. Raises CommandRefused."""
        query: dict[str, str] = {}
        if self.since is not None:
            try:
                query["sinceSeconds"] = str(max(1, math.ceil(Duration(self.since))))
            except ValueError as error:
                raise CommandRefused(f"--since {self.since}: {error}") from error
        if self.tail is not None and self.rank is None:
            query["tailLines"] = str(self.tail)
        return query


@dataclass
class Logs:
    """One run of the command."""

    cluster: UserCluster
    namespace: str
    request: LogRequest
    console: Console
    errors: Console = field(default_factory=lambda: Console(stderr=True))
    _last: dict[str, float] = field(default_factory=dict)
    _failed: set[str] = field(default_factory=set)

    async def run(self) -> int:
        """The exit code: 1 when a log could not be read. Raises CommandFailed, AdapterError."""
        query = self.request.query()
        obj = await existing(self.cluster, self.namespace, self.request.name)
        self._check_rank(obj)
        pods = await self._pods()
        if not pods and not self.request.follow:
            of = "" if self.request.group is None else f" in replica group {self.request.group}"
            say(self.errors, f"{self.request.name} has no pods{of}")
        found = await asyncio.gather(*(self._history(pod, query) for pod in pods))
        for line in sorted(line for lines in found for line in lines):
            self._print(line)
        if self.request.follow:
            await self._follow()
        return 1 if self._failed else 0

    def _check_rank(self, obj: Json) -> None:
        sizes = obj["spec"].get("parallelism") or {}
        ranks = int(sizes.get("tensor") or 1) * int(sizes.get("pipeline") or 1)
        if self.request.rank is not None and not 0 <= self.request.rank < ranks:
            raise CommandRefused(
                f"--rank {self.request.rank}: a replica group of {self.request.name} has ranks 0 to {ranks - 1}"
            )

    async def _pods(self) -> list[Json]:
        """The selected pods, of all attempts."""
        selector = [f"{names.NAME_LABEL}={self.request.name}"]
        if self.request.group is not None:
            selector.append(f"{names.GROUP_LABEL}={self.request.group}")
        path = core_path(self.namespace, "pods")
        answer = await self.cluster.read(path, {"labelSelector": ",".join(selector)})
        return [pod for pod in answer.get("items") or [] if names.pod_identity(pod["metadata"]) is not None]

    async def _history(self, pod: Json, query: Mapping[str, str]) -> list[LogLine]:
        name = pod["metadata"]["name"]
        self._last[name] = 0.0
        if not has_started(pod):
            if not self.request.follow:
                say(self.errors, f"{name} has not started: it has no log yet")
            return []
        try:
            lines = [line async for line in read_lines(self.cluster, self.namespace, name, query)]
        except AdapterError as error:
            self._report_error(name, error)
            return []
        self._last[name] = max((line.time for line in lines if math.isfinite(line.time)), default=0.0)
        wanted = [line for line in lines if self._wants(line)]
        return wanted[-self.request.tail :] if self.request.tail else wanted[: self.request.tail]

    async def _follow(self) -> None:
        """Follow the logs until the resource and its pods are gone."""
        async with asyncio.TaskGroup() as readers:
            followed: set[str] = set()
            while True:
                if await self._is_over(readers, followed):
                    return
                await asyncio.sleep(LOOK)

    async def _is_over(self, readers: asyncio.TaskGroup, followed: set[str]) -> bool:
        """Start readers for new pods. An outage of the API server only delays this."""
        try:
            pods = await self._pods()
            over = not pods and await self.cluster.get("MegatronInference", self.namespace, self.request.name) is None
        except AdapterError as error:
            self._report_error(PODS, error)
            return False
        self._failed.discard(PODS)
        for pod in pods:
            if pod["metadata"]["uid"] not in followed and has_started(pod):
                followed.add(pod["metadata"]["uid"])
                readers.create_task(self._read_on(pod["metadata"]["name"]))
        return over

    async def _read_on(self, name: str) -> None:
        """Follow one pod's log. When the stream breaks while the pod runs, reading continues after the last line."""
        while True:
            last = self._last.get(name, 0.0)
            # The limits apply only while no line was printed; the log of a new pod is printed from the start.
            limits = self.request.query() if last == 0.0 and name in self._last else {}
            query = {**limits, "follow": "true"}
            try:
                async for line in read_lines(self.cluster, self.namespace, name, query, after=last):
                    self._last[name] = max(self._last.get(name, 0.0), line.time if math.isfinite(line.time) else 0.0)
                    if self._wants(line):
                        self._print(line)
                self._failed.discard(name)
                pod = await self.cluster.get("Pod", self.namespace, name)
                if pod is None or (pod.get("status") or {}).get("phase") in FINISHED:
                    return
            except AdapterError as error:
                self._report_error(name, error)
            await asyncio.sleep(LOOK)

    def _wants(self, line: LogLine) -> bool:
        return self.request.rank is None or line.is_of(self.request.rank)

    def _report_error(self, name: str, error: AdapterError) -> None:
        if name not in self._failed:
            self._failed.add(name)
            say(self.errors, f"{name}: cannot be read: {in_words(error, self.cluster)}")

    def _print(self, line: LogLine) -> None:
        prefix = Text(line.pod, style=POD_STYLES[zlib.crc32(line.pod.encode()) % len(POD_STYLES)])
        say(self.console, prefix.append(f" {line.text}", style="default"))
