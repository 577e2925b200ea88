"""The port between decisions and the outside: what was observed, and what may be done about it.

``plan.py`` and ``status.py`` see only the frozen values below. Two adapters fill them in and carry the actions out:
``kubernetes.py`` (an API server) and ``local.py`` (processes on this machine).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

Manifest = Mapping[str, Any]


class PodPhase(StrEnum):
    """The kubelet's word on a pod, as in ``status.phase``."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


class EngineState(StrEnum):
    """States of the engine as the leader's control API names them."""

    RUNNING = "RUNNING"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    UNPAUSING = "UNPAUSING"
    SUSPENDING = "SUSPENDING"
    SUSPENDED = "SUSPENDED"
    RESUMING = "RESUMING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


class Signal(StrEnum):
    """Control signals that the leader's control API takes, ``POST /v1/<signal>``."""

    PAUSE = "pause"
    UNPAUSE = "unpause"
    SUSPEND = "suspend"
    RESUME = "resume"
    STOP = "stop"


@dataclass(frozen=True)
class Failure:
    """Why a pod ended or cannot start. ``reason`` is CamelCase, as in Kubernetes conditions."""

    reason: str
    message: str
    rank: int | None = None
    exit_code: int | None = None


@dataclass(frozen=True)
class Loading:
    """Weights read so far by a pod's ranks, in bytes."""

    loaded_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class ObservedPod:
    """One pod of a group attempt. Times are seconds since the epoch."""

    name: str
    uid: str
    group: int
    attempt: int
    index: int
    leader: bool
    template_hash: str
    phase: PodPhase
    ready: bool
    created_at: float
    address: str | None = None
    finished_at: float | None = None
    deleting: bool = False
    waiting: Failure | None = None
    """A cause that keeps the pod from starting: Unschedulable, ImagePull, ..."""
    failure: Failure | None = None
    """Set when the phase is Failed (or Succeeded although it should run)."""
    rank_phase: str | None = None
    """The least advanced phase among the pod's ranks: Starting, Loading, Rendezvous, Registering, Serving."""
    loading: Loading | None = None


@dataclass(frozen=True)
class ObservedReplica:
    """A replica group as the coordinator knows it."""

    group: int
    state: EngineState


@dataclass(frozen=True)
class ObservedEngine:
    """The leader's answer. ``state`` is None until a replica has registered."""

    reachable: bool
    state: EngineState | None = None
    replicas: tuple[ObservedReplica, ...] = ()
    running_requests: int = 0
    waiting_requests: int = 0
    message: str = ""


@dataclass(frozen=True)
class World:
    """Everything a decision may depend on besides the resource. ``now`` is the only clock."""

    now: float
    pods: tuple[ObservedPod, ...] = ()
    engine: ObservedEngine | None = None
    """None when there is no leader pod to ask."""
    children: Mapping[str, str] = field(default_factory=dict)
    """``Kind/name`` of every child that exists besides pods, to the hash of the manifest it was applied from."""


@dataclass(frozen=True)
class ApplyChild:
    """Create the child or bring it to this manifest (server-side apply)."""

    manifest: Manifest


@dataclass(frozen=True)
class DeleteChild:
    """Remove a child that should not exist; gone already is success."""

    kind: str
    name: str


@dataclass(frozen=True)
class CreatePod:
    """Create a pod; one that exists already under this name is success."""

    manifest: Manifest


@dataclass(frozen=True)
class DeletePod:
    """Delete a pod, giving its launcher ``grace_seconds`` to drain."""

    name: str
    uid: str
    grace_seconds: int


@dataclass(frozen=True)
class SendSignal:
    """Ask the leader at ``address`` for one legal transition."""

    signal: Signal
    address: str


Action = ApplyChild | DeleteChild | CreatePod | DeletePod | SendSignal


class WorldPort(Protocol):
    """What an adapter offers. Both methods may raise ``WorldError``; the next reconcile tries again."""

    async def observe(self, name: str, namespace: str) -> World:
        """The current children of the resource and its engine's state."""
        ...

    async def apply(self, name: str, namespace: str, action: Action) -> None:
        """Carry out one action. Idempotent: a repeated action ends in the same place."""
        ...


class WorldError(Exception):
    """The outside did not do as asked; ``str()`` is fit for a condition's message."""
