"""The port between decisions and the outside: what was observed, and what may be done about it.

``plan.py`` and ``status.py`` see only the frozen values below. Two adapters fill them in and carry the actions out:
``kubernetes`` (an API server) and ``local`` (processes on this machine).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from megatron_operator.api.v1alpha1 import Lifecycle

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
    """Control signals that the leader's control API takes, ``POST /v1/<signal>``.

    ``stop`` is never sent from here: pods that are to stop are deleted.
    """

    PAUSE = "pause"
    UNPAUSE = "unpause"
    SUSPEND = "suspend"
    RESUME = "resume"
    STOP = "stop"


RANK_PHASES = ("Exited", "Starting", "Rendezvous", "Loading", "Registering", "Serving")
"""Phases of a rank process, from the least to the most advanced."""

BAD_INPUT_EXIT_CODE = 2
"""The launcher's exit code for what no retry mends: a wrong flag, a broken checkpoint, too little memory."""


@dataclass(frozen=True)
class Failure:
    """Why a pod ended or cannot start. ``reason`` is CamelCase, as in Kubernetes conditions."""

    reason: str
    message: str
    rank: int | None = None
    exit_code: int | None = None

    @property
    def bad_input(self) -> bool:
        """Whether trying again with the same spec would end in the same way."""
        return self.exit_code == BAD_INPUT_EXIT_CODE


@dataclass(frozen=True)
class Loading:
    """Weights read so far by a pod's ranks, in bytes."""

    loaded_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class ObservedPod:
    """One pod of a group attempt. Times are seconds since the epoch.

    Identity, ``leader``, ``epoch``, ``template_hash`` and ``restarts`` are read from the labels and annotations that
    ``render`` and ``SetRoleLabel`` put there (``names.pod_identity``).
    """

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
    restarts: int = 0
    """Restarts of the group that were counted against its budget when this attempt was created."""
    address: str | None = None
    node: str | None = None
    ready_changed_at: float | None = None
    """When ``ready`` last changed; None where it never did."""
    finished_at: float | None = None
    deletion_deadline: float | None = None
    """Set once deletion was asked for: the time by which the pod should be gone."""
    waiting: Failure | None = None
    """A cause that keeps the pod from starting: Unschedulable, ImagePull, ..."""
    failure: Failure | None = None
    """Set when the phase is Failed (or Succeeded although it should run)."""
    rank_phase: str | None = None
    """The least advanced phase among the pod's ranks: Starting, Loading, Rendezvous, Registering, Serving."""
    loading: Loading | None = None
    launcher_restarts: int = 0
    """Ranks that the pod's launcher restarted in place."""
    epoch: int = 0
    """Number of the decision by which it leads, or led last."""
    reports_leader: bool | None = None
    """Whether its launcher takes itself for the leader; None while it does not say."""
    known_epoch: int = 0
    """Number of the last decision about who leads that its launcher has heard of."""
    registered: bool = False
    """Whether its engine hears a coordinator that knows it, as its launcher says."""
    unreachable_since: float | None = None
    """Since when its launcher has not answered: its creation for one that could not be asked yet; None when it does."""

    @property
    def deleting(self) -> bool:
        """Whether deletion was asked for, by whomever."""
        return self.deletion_deadline is not None

    @property
    def finished(self) -> bool:
        """Whether its processes have ended for good."""
        return self.phase in (PodPhase.FAILED, PodPhase.SUCCEEDED)


@dataclass(frozen=True)
class ObservedReplica:
    """A replica group as the coordinator knows it."""

    group: int
    state: EngineState


@dataclass(frozen=True)
class ObservedEngine:
    """The leader's answer. ``state`` is None until a replica has registered.

    ``message`` is the leader's own error, or, while it is unreachable, why.
    """

    reachable: bool
    state: EngineState | None = None
    auto_suspended: bool = False
    """Whether it sleeps for want of requests, or is on its way there or back: the leader sees to it."""
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
    """``Kind/name`` of every child that exists besides pods, to the hash annotation of the manifest it was applied from
    (``names.applied_hash``)."""
    taken: frozenset[str] = frozenset()
    """``Kind/name`` of children whose names objects of others have."""
    url: str | None = None
    """Where clients reach the HTTP frontend, where that is not the Service's DNS name."""


@dataclass(frozen=True)
class ApplyChild:
    """Create the child or bring it to this manifest (server-side apply)."""

    manifest: Manifest


@dataclass(frozen=True)
class DeleteChild:
    """Delete a child besides pods that should not exist any more; one that is gone is success."""

    kind: str
    name: str


@dataclass(frozen=True)
class CreateSecret:
    """Create the Secret with a random value (``secrets.token_urlsafe(32)``) for each of ``random_keys``.

    One that exists already is success and stays as it is, so that its values are made only once.
    """

    manifest: Manifest
    random_keys: tuple[str, ...]


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


@dataclass(frozen=True)
class SetRoleLabel:
    """Give a pod the label of its role; one that is gone, or whose name another has taken, is success."""

    name: str
    uid: str
    leader: bool
    epoch: int | None = None
    """Number of the decision; None: that of the last one about this pod stays."""


@dataclass(frozen=True)
class SendRole:
    """Tell the launcher at ``address`` that it leads from now on, or that another one does.

    A leader brings its engines to ``lifecycle`` as they register.
    """

    address: str
    leader: bool
    epoch: int
    lifecycle: Lifecycle


Action = ApplyChild | DeleteChild | CreateSecret | CreatePod | DeletePod | SendSignal | SetRoleLabel | SendRole


class WorldError(Exception):
    """The outside did not do as asked; ``str()`` is fit for a condition's message. The next reconcile tries again."""


class ActionRefused(WorldError):
    """The outside understood and refused (forbidden, invalid manifest): trying again soon is of no use."""


class NamespaceTerminating(ActionRefused):
    """The namespace is being deleted: nothing can be made in it any more, and all that is in it goes."""


class KindMissing(ActionRefused):
    """The outside does not know this kind of object: no use in trying again before the adapter says that it does."""


class SignalRefused(WorldError):
    """The engine's state forbids the signal; ``allowed`` are those that it takes."""

    def __init__(self, message: str, allowed: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.allowed = allowed


class WorldPort(Protocol):
    """What an adapter offers. Both methods may raise ``WorldError``."""

    async def observe(self, name: str, namespace: str) -> World:
        """The current children of the resource and its engine's state."""
        ...

    async def apply(self, name: str, namespace: str, action: Action) -> None:
        """Carry out one action. Idempotent: a repeated action ends in the same place."""
        ...
