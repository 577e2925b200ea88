"""What the control API says about this pod, with a revision that grows with every change."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from megatron_runtime.headers import EngineState
from megatron_runtime.lifecycle import IDLE_STATES
from megatron_runtime.notifier import Notifier


class RankPhase(StrEnum):
    """How far a rank has come."""

    STARTING = "Starting"
    LOADING = "Loading"
    RENDEZVOUS = "Rendezvous"
    REGISTERING = "Registering"
    SERVING = "Serving"
    EXITED = "Exited"


@dataclass(frozen=True)
class RankState:
    """One rank of this pod. Bytes count the weights."""

    rank: int
    phase: RankPhase = RankPhase.STARTING
    loaded_bytes: int = 0
    total_bytes: int = 0
    message: str = ""
    registered: bool = False
    """Whether the coordinator knows its engine over the connection that there is now; of a group's first rank alone."""

    def body(self) -> dict[str, Any]:
        """As the control API writes it."""
        return {
            "rank": self.rank,
            "phase": self.phase.value,
            "loadedBytes": self.loaded_bytes,
            "totalBytes": self.total_bytes,
            "message": self.message,
            "registered": self.registered,
        }


@dataclass(frozen=True)
class ReplicaGroupState:
    """A replica as the coordinator knows it. Its load changes all the time and makes no new revision."""

    index: int
    state: str
    running_requests: int = field(default=0, compare=False)
    waiting_requests: int = field(default=0, compare=False)
    kv_blocks_total: int = field(default=0, compare=False)
    kv_blocks_used: int = field(default=0, compare=False)
    weight_version: int = 0
    prompt_tokens: int = field(default=0, compare=False)
    """Of prompts that it took up since it started, cached or not."""
    generated_tokens: int = field(default=0, compare=False)
    """Generated since it started."""

    @property
    def paused_requests(self) -> int:
        """All its requests, while it computes for none."""
        return self.running_requests + self.waiting_requests if EngineState(self.state) in IDLE_STATES else 0

    def body(self) -> dict[str, Any]:
        """As the control API writes it."""
        return {
            "index": self.index,
            "state": self.state,
            "runningRequests": self.running_requests,
            "waitingRequests": self.waiting_requests,
            "weightVersion": self.weight_version,
        }


@dataclass(frozen=True)
class PodFacts:
    """Everything that the control API reports, as values."""

    is_leader: bool
    epoch: int = 0
    """Number of the last decision about who leads that this pod was told."""
    is_settling: bool = False
    """Whether it has come to lead a moment ago, so that replicas may not have registered yet."""
    has_frontends: bool = False
    """Whether requests come in here: at the first pod of every group."""
    engine_state: str | None = None
    """The coordinator's state; None before a replica has registered, and on pods that do not lead."""
    auto_suspended: bool = False
    """Whether the engines are suspended for want of requests, or on their way there or back; a request wakes them."""
    replica_groups: tuple[ReplicaGroupState, ...] = ()
    ranks: Mapping[int, RankState] = field(default_factory=dict)
    frontends_listening: int = 0
    dropped_messages: int = field(default=0, compare=False)
    """Bad messages to the coordinator since it started."""
    draining: bool = False
    restarts: int = 0
    error: Mapping[str, Any] | None = None

    @property
    def ready(self) -> bool:
        """Where requests come in, frontends have to listen; paused and suspended engines count, since requests queue.

        A leader is ready when any replica serves; another pod when its own ranks do, also while it takes the lead.
        """
        if self.draining or (self.has_frontends and not self.frontends_listening):
            return False
        if self.is_leader and (self.engine_state is not None or not self.is_settling):
            return bool(self.replica_groups) and self.engine_state is not None
        return bool(self.ranks) and all(rank.phase is RankPhase.SERVING for rank in self.ranks.values())

    def body(self) -> dict[str, Any]:
        """The answer of ``GET /v1/state``, without the revision."""
        return {
            "role": "leader" if self.is_leader else "worker",
            "epoch": self.epoch,
            "engineState": self.engine_state,
            "autoSuspended": self.auto_suspended,
            "replicaGroups": [group.body() for group in self.replica_groups],
            "ranks": [rank.body() for _, rank in sorted(self.ranks.items())],
            "requests": {
                "running": sum(group.running_requests for group in self.replica_groups),
                "waiting": sum(group.waiting_requests for group in self.replica_groups),
            },
            "ready": self.ready,
            "draining": self.draining,
            "restarts": self.restarts,
            "error": None if self.error is None else dict(self.error),
        }


class PodState:
    """Holds the current facts and wakes whoever waits for others."""

    def __init__(self, facts: PodFacts) -> None:
        self.facts = facts
        self.revision = 1
        self._changed = Notifier()

    def update(self, **changes: Any) -> None:
        """Replaces fields of the facts; the revision grows if that makes a difference."""
        before, self.facts = self.facts, replace(self.facts, **changes)
        if self.facts == before:
            return
        self.revision += 1
        self._changed.notify()

    def update_rank(self, rank: int, **changes: Any) -> None:
        """Replaces fields of one rank's state; a rank not seen before starts in ``Starting``."""
        before = self.facts.ranks.get(rank, RankState(rank))
        after = replace(before, **changes)
        self.update(ranks={**self.facts.ranks, rank: after})

    async def wait_for_change(self, after: int, timeout: float) -> None:
        """Returns when the revision is another one than ``after``, or after ``timeout`` seconds.

        A revision from before a restart of this launcher differs, whichever is greater, and is answered at once.
        """
        if after != self.revision:
            return
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            return

    def body(self) -> dict[str, Any]:
        """The answer of ``GET /v1/state``."""
        return {"revision": self.revision, **self.facts.body()}
