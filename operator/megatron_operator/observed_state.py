"""The interface between decisions and adapters: the observed state, and actions.

``plan.py`` and ``status.py`` use only the frozen values below. Two adapters provide them and carry out the actions:
``kubernetes`` (an API server) and ``local`` (processes on this machine).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from megatron_operator.api.v1alpha1 import Cache, Lifecycle
from megatron_operator.downloads import ObservedDownload

Manifest = Mapping[str, Any]


class PodPhase(StrEnum):
    """``status.phase`` of a pod, as the kubelet sets it."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


class EngineState(StrEnum):
    """States of the engine, as the leader's control API names them."""

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
    """Control signals of the leader's control API, ``POST /v1/<signal>``.

    The operator never sends ``stop``: it deletes pods instead.
    """

    PAUSE = "pause"
    UNPAUSE = "unpause"
    SUSPEND = "suspend"
    RESUME = "resume"
    STOP = "stop"


RANK_PHASES = ("Exited", "Starting", "Rendezvous", "Loading", "Registering", "Serving")
"""Phases of a rank process, from the least to the most advanced."""

BAD_INPUT_EXIT_CODE = 2
"""The launcher's exit code for errors that no retry fixes: an invalid flag, a broken checkpoint, too little memory."""


@dataclass(frozen=True)
class Failure:
    """Why a pod ended or cannot start. ``reason`` is CamelCase, as in Kubernetes conditions."""

    reason: str
    message: str
    rank: int | None = None
    exit_code: int | None = None
    disruption: bool = False
    """Whether the cluster ended the pod (eviction, preemption, a node that shut down). The model did not fail."""

    @property
    def bad_input(self) -> bool:
        """Whether a retry with the same spec would fail in the same way."""
        return self.exit_code == BAD_INPUT_EXIT_CODE


@dataclass(frozen=True)
class Loading:
    """Bytes of weights that a pod's ranks have read so far."""

    loaded_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class ObservedPod:
    """One pod of an attempt. Times are seconds since the epoch.

    Identity, ``leader``, ``epoch``, ``template_hash`` and ``restarts`` come from the labels and annotations that
    ``render`` and ``SetRoleLabel`` write (``names.pod_identity``).
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
    default_image: str | None = None
    """The operator's default image at its creation; None for a pod with the image of the spec."""
    restarts: int = 0
    """Restarts of the group that counted against its budget when this attempt was created."""
    address: str | None = None
    node: str | None = None
    startup_since: float | None = None
    """When its start began: when it was scheduled, or later, when its last init container ended or its containers
    started. None before it is scheduled."""
    ready_changed_at: float | None = None
    """When ``ready`` last changed; None where it never did."""
    finished_at: float | None = None
    deletion_deadline: float | None = None
    """Time by which a pod that is being deleted should be gone; None for other pods."""
    waiting: Failure | None = None
    """Why the pod cannot start: Unschedulable, ImagePull, ..."""
    failure: Failure | None = None
    """Set when the phase is Failed, or Succeeded although the pod should run."""
    disruption: Failure | None = None
    """Why the cluster ends or has ended the pod; None for a pod that it leaves alone."""
    rank_phase: str | None = None
    """The least advanced phase of the pod's ranks: Starting, Loading, Rendezvous, Registering, Serving."""
    loading: Loading | None = None
    launcher_restarts: int = 0
    """Ranks that the pod's launcher restarted in place."""
    epoch: int = 0
    """Epoch of the last decision that made the pod the leader."""
    reports_leader: bool | None = None
    """Whether its launcher reports the leader role; None before it answers."""
    known_epoch: int = 0
    """The newest epoch that its launcher has received."""
    registered: bool = False
    """Whether its launcher reports that its engine is registered with a coordinator."""
    cached_source: str | None = None
    """Hash of the source that it reads from the model cache; None without one."""
    workload: str | None = None
    """Kueue's Workload that keeps the pod until its group has ended; None for a pod that Kueue does not manage."""
    unreachable_since: float | None = None
    """Since when its launcher has not answered. Its creation time before it has an address; None while it answers."""

    @property
    def deleting(self) -> bool:
        """Whether its deletion was requested."""
        return self.deletion_deadline is not None

    @property
    def finished(self) -> bool:
        """Whether its containers have ended for good."""
        return self.phase in (PodPhase.FAILED, PodPhase.SUCCEEDED)


@dataclass(frozen=True)
class ObservedReplica:
    """A replica group as the coordinator reports it."""

    group: int
    state: EngineState


@dataclass(frozen=True)
class ObservedEngine:
    """The engine as the leader reports it. ``state`` is None until a replica group has registered.

    ``message`` is the leader's error, or the reason why it is unreachable.
    """

    reachable: bool
    state: EngineState | None = None
    auto_suspended: bool = False
    """Whether the leader suspended it because it was idle, or is doing so, or is resuming it."""
    replicas: tuple[ObservedReplica, ...] = ()
    running_requests: int = 0
    waiting_requests: int = 0
    generated_tokens: int = 0
    """Tokens that the present engines have generated since their start."""
    message: str = ""


@dataclass(frozen=True)
class ObservedState:
    """Everything a decision depends on besides the resource. ``now`` is the only clock."""

    now: float
    pods: tuple[ObservedPod, ...] = ()
    orphans: tuple[ObservedPod, ...] = ()
    """Pods of a deleted resource of the same name (``kubectl delete --cascade=orphan``), which have no owner."""
    engine: ObservedEngine | None = None
    """None without a leader pod."""
    children: Mapping[str, str] = field(default_factory=dict)
    """``Kind/name`` of every existing child besides pods, mapped to the hash annotation of the manifest it was applied
    from (``names.applied_hash``)."""
    taken: frozenset[str] = frozenset()
    """``Kind/name`` of children whose names are taken by objects of other owners."""
    gang_kinds: frozenset[str] = frozenset()
    """Kinds of ``names.GANG_KINDS`` that the cluster serves."""
    budget_kind: str | None = None
    """Which of ``names.BUDGET_KINDS`` the cluster serves; None for neither."""
    cordoned_nodes: frozenset[str] | None = None
    """Names of the nodes that are cordoned; None where the operator may not read nodes."""
    downloads: tuple[ObservedDownload, ...] = ()
    """The Jobs that fill the model cache."""
    cache_nodes: tuple[str, ...] | None = ()
    """Nodes that get the model of a node-local cache; None where the operator may not list nodes."""
    url: str | None = None
    """Base URL of the HTTP frontend where it differs from the Service's DNS name."""


@dataclass(frozen=True)
class ApplyChild:
    """Create the child or update it to this manifest (server-side apply). A Job is only created, if it is missing."""

    manifest: Manifest


@dataclass(frozen=True)
class DeleteChild:
    """Delete a child other than a pod, or Kueue's Workload of pods. A missing one is success."""

    kind: str
    name: str


@dataclass(frozen=True)
class CreateSecret:
    """Create the Secret with a random value (``secrets.token_urlsafe(32)``) for each of ``random_keys``.

    An existing Secret is success and keeps its values.
    """

    manifest: Manifest
    random_keys: tuple[str, ...]


@dataclass(frozen=True)
class CreatePod:
    """Create a pod. An existing pod of that name is success."""

    manifest: Manifest


@dataclass(frozen=True)
class AdoptPod:
    """Make the resource the owner of a pod without one. A pod that is gone or replaced is success."""

    name: str
    uid: str
    owner: Manifest
    """The owner reference."""


@dataclass(frozen=True)
class DeletePod:
    """Delete a pod and give its launcher ``grace_seconds`` to drain."""

    name: str
    uid: str
    grace_seconds: int


@dataclass(frozen=True)
class SendSignal:
    """Send one signal to the leader at ``address``."""

    signal: Signal
    address: str


@dataclass(frozen=True)
class SetRoleLabel:
    """Set the role label of a pod. A pod that is gone or replaced is success."""

    name: str
    uid: str
    leader: bool
    epoch: int | None = None
    """Epoch of the decision; None to keep that of the last one."""


@dataclass(frozen=True)
class SendRole:
    """Send the role to the launcher at ``address``.

    A leader brings its engines to ``lifecycle`` as they register.
    """

    address: str
    leader: bool
    epoch: int
    lifecycle: Lifecycle


Action = (
    ApplyChild | DeleteChild | CreateSecret | CreatePod | AdoptPod | DeletePod | SendSignal | SetRoleLabel | SendRole
)


class AdapterError(Exception):
    """An observation or action failed. ``str()`` is the message for a condition. The next round retries."""


class ActionRefused(AdapterError):
    """The action was refused (forbidden, invalid manifest). An immediate retry is of no use."""


class NamespaceTerminating(ActionRefused):
    """The namespace is being deleted and accepts no new objects."""


class KindMissing(ActionRefused):
    """The cluster does not have this kind of object. The adapter wakes the loop when it has."""


class SignalRefused(AdapterError):
    """The engine's state forbids the signal. ``allowed`` are the signals that it accepts."""

    def __init__(self, message: str, allowed: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.allowed = allowed


class ClusterAdapter(Protocol):
    """The interface of an adapter. All methods may raise ``AdapterError``."""

    async def dropped_fields(self, pod: Manifest, override: Manifest) -> Mapping[str, Any]:
        """Paths and values of fields in ``override``, a part of the pod's spec, that the cluster would not store.

        Raises ActionRefused when it would refuse the pod as invalid.
        """
        ...

    async def observe(self, name: str, namespace: str, cache: Cache | None = None) -> ObservedState:
        """The current children of the resource, the state of its engine and that of its model cache."""
        ...

    async def apply(self, name: str, namespace: str, action: Action) -> None:
        """Carry out one action. Actions are idempotent."""
        ...
