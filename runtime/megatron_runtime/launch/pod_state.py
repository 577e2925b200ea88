"""The state of this pod that the control API reports, with a revision that grows with every change."""

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
    """The progress of a rank."""

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
    """Whether its engine is registered over the current connection; only of a replica group's first rank."""

    def body(self) -> dict[str, Any]:
        """The JSON of the control API."""
        return {
            "rank": self.rank,
            "phase": self.phase.value,
            "loadedBytes": self.loaded_bytes,
            "totalBytes": self.total_bytes,
            "message": self.message,
            "registered": self.registered,
        }


@dataclass(frozen=True)
class RegisteredReplicaGroup:
    """A registered replica group. Changes of its load make no new revision."""

    index: int
    state: str
    running_requests: int = field(default=0, compare=False)
    waiting_requests: int = field(default=0, compare=False)
    kv_blocks_total: int = field(default=0, compare=False)
    kv_blocks_used: int = field(default=0, compare=False)
    weight_version: int = 0
    prompt_tokens: int = field(default=0, compare=False)
    """Prompt tokens of requests scheduled since its start, cached or not."""
    generated_tokens: int = field(default=0, compare=False)
    """Tokens generated since its start."""
    draft_tokens: int = field(default=0, compare=False)
    """Tokens drafted since its start."""
    accepted_draft_tokens: int = field(default=0, compare=False)
    """Those that were the sampled tokens."""

    @property
    def paused_requests(self) -> int:
        """Number of its requests while it is paused or suspended, else 0."""
        return self.running_requests + self.waiting_requests if EngineState(self.state) in IDLE_STATES else 0

    def body(self) -> dict[str, Any]:
        """The JSON of the control API."""
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
    """Number of the newest decision about the leader that this pod got."""
    is_settling: bool = False
    """Whether it became the leader recently, so that replica groups may not have registered yet."""
    has_frontends: bool = False
    """Whether the pod has frontends: true for the first pod of every replica group."""
    engine_state: str | None = None
    """The state of the service; None before a replica group has registered, and on pods that do not lead."""
    auto_suspended: bool = False
    """Whether the engines are suspended because they were idle, or move to that state or back."""
    replica_groups: tuple[RegisteredReplicaGroup, ...] = ()
    ranks: Mapping[int, RankState] = field(default_factory=dict)
    frontends_listening: int = 0
    dropped_messages: int = field(default=0, compare=False)
    """Dropped messages of the coordinator since its start."""
    is_ending: bool = False
    """Whether the end of the pod has begun: it is not ready, and can't become the leader."""
    draining: bool = False
    """Whether every frontend of the ending pod has begun its drain: a standalone pod refuses all new requests."""
    restarts: int = 0
    error: Mapping[str, Any] | None = None

    @property
    def ready(self) -> bool:
        """A leader is ready when a replica group is registered, another pod when its own ranks serve, and a pod with
        frontends when one of them listens. Paused and suspended engines count as ready, since requests queue. A new
        leader stays as ready as it was until replica groups have registered.
        """
        if self.is_ending or (self.has_frontends and not self.frontends_listening):
            return False
        if self.is_leader and (self.engine_state is not None or not self.is_settling):
            return bool(self.replica_groups) and self.engine_state is not None
        return bool(self.ranks) and all(rank.phase is RankPhase.SERVING for rank in self.ranks.values())

    def body(self) -> dict[str, Any]:
        """The response of ``GET /v1/state``, without the revision."""
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
            "generatedTokens": sum(group.generated_tokens for group in self.replica_groups),
            "ready": self.ready,
            "draining": self.draining,
            "restarts": self.restarts,
            "error": None if self.error is None else dict(self.error),
        }


class PodState:
    """Holds the current facts and wakes the tasks that wait for a change."""

    def __init__(self, facts: PodFacts) -> None:
        self.facts = facts
        self.revision = 1
        self._changed = Notifier()

    def update(self, **changes: Any) -> None:
        """Replaces fields of the facts; the revision grows if a value changes."""
        before, self.facts = self.facts, replace(self.facts, **changes)
        if self.facts == before:
            return
        self.revision += 1
        self._changed.notify()

    def update_rank(self, rank: int, **changes: Any) -> None:
        """Replaces fields of one rank's state; a new rank begins in ``Starting``."""
        before = self.facts.ranks.get(rank, RankState(rank))
        after = replace(before, **changes)
        self.update(ranks={**self.facts.ranks, rank: after})

    async def wait_for_change(self, after: int, timeout: float) -> None:
        """Returns when the revision differs from ``after``, or after ``timeout`` seconds.

        A revision of an earlier launcher process differs, and returns at once.
        """
        if after != self.revision:
            return
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            return

    def body(self) -> dict[str, Any]:
        """The response of ``GET /v1/state``."""
        return {"revision": self.revision, **self.facts.body()}
