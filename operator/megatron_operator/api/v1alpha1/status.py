"""``status``: what the operator reports."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from megatron_operator.api.v1alpha1.base import Report


class Phase(StrEnum):
    """A summary for users; programs read the conditions."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    PAUSED = "Paused"
    SUSPENDED = "Suspended"
    STOPPED = "Stopped"
    DEGRADED = "Degraded"
    FAILED = "Failed"
    TERMINATING = "Terminating"


class CachePhase(StrEnum):
    """Progress of a model cache."""

    PENDING = "Pending"
    DOWNLOADING = "Downloading"
    VERIFYING = "Verifying"
    READY = "Ready"
    FAILED = "Failed"


class ConditionType(StrEnum):
    """Condition types. Every resource has all of them, except Cached, which those with a model cache have."""

    READY = "Ready"
    AVAILABLE = "Available"
    PROGRESSING = "Progressing"
    PAUSED = "Paused"
    SUSPENDED = "Suspended"
    DEGRADED = "Degraded"
    FAILED = "Failed"
    CACHED = "Cached"


ConditionStatus = Literal["True", "False", "Unknown"]


class Condition(Report):
    """A condition, as in other Kubernetes resources."""

    type: str
    """Ready, Available, Progressing, Paused, Suspended, Degraded, Failed or Cached."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: str
    """Cause, as a CamelCase word."""
    message: str = ""
    """Cause, as a message for users."""
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When the status last changed."""
    observed_generation: int = 0
    """Generation of the spec that the condition refers to."""


class LastFailure(Report):
    """Why an attempt of a replica group ended."""

    attempt: int = 0
    """The attempt that ended."""
    pod: str = ""
    """The pod that failed."""
    rank: int | None = None
    """The rank that failed, if known."""
    exit_code: int | None = None
    """Exit code of the process, if known."""
    reason: str = ""
    """Cause, as a CamelCase word."""
    message: str = ""
    """Cause, as the pod reported it."""
    disruption: bool = False
    """Whether the cluster ended the pod (eviction, preemption, node shutdown), so that the restart does not count."""
    time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When it ended."""


class ReplicaGroupStatus(Report):
    """One replica group."""

    index: int
    """Index of the replica group, from 0."""
    attempt: int | None = None
    """The latest observed attempt; part of the pods' names."""
    template_hash: str | None = None
    """Hash of the template that the attempt was created from."""
    ready_pods: int = 0
    """Ready pods of the attempt."""
    total_pods: int = 0
    """Pods of a complete replica group."""
    restarts: int = 0
    """Restarts counted against the budget."""
    last_failure: LastFailure | None = None
    """Failure of the latest attempt that failed."""


class LeaderStatus(Report):
    """The pod that runs the coordinator."""

    pod: str = ""
    """Name of the pod."""
    replica_group: int = 0
    """Index of its replica group."""
    epoch: int = 0
    """Number of the decision that made it the leader; each later decision has a greater one."""


class CacheStatus(Report):
    """The model cache."""

    phase: CachePhase = CachePhase.PENDING
    """Pending, Downloading, Verifying, Ready or Failed."""
    source: str = ""
    """Hash of the source that the cache is filled with; the name of its folder."""
    in_use: list[str] = Field(default=[])
    """Hashes of all sources that the resource or its running pods use."""
    commit: str = ""
    """Commit of the repository that was downloaded."""
    downloaded_bytes: int = 0
    """Bytes that were downloaded, on all nodes, in steps of 1 %."""
    total_bytes: int = 0
    """Bytes of the model, times the number of nodes; 0 until it is known."""
    nodes: int = 0
    """Nodes that get the model; 0 for a volume claim."""
    filled_nodes: int = 0
    """Nodes that have the model."""
    message: str = ""
    """What the cache waits for, or why it failed, as a message for users."""


class MegatronInferenceStatus(Report):
    """The observed state of a MegatronInference."""

    observed_generation: int = 0
    """Generation of the spec that this status refers to."""
    phase: Phase = Phase.PENDING
    """Pending, Starting, Running, Paused, Suspended, Stopped, Degraded, Failed or Terminating."""
    engine_state: str | None = None
    """State of the engine as the leader reports it: RUNNING, PAUSED, SUSPENDED, or a transitional state."""
    engine_state_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = None
    """Time of the last change of the engine state."""
    idle_stop_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = None
    """When the pods were stopped because the model was idle (`autoSuspend.stopAfter`); not set while they run."""
    activation_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = None
    """When an activator last got a request for a stopped model. It starts the pods; written by activators."""
    image: str | None = None
    """Image of the runtime in new pods. A resource without spec.image keeps the default image of an earlier operator
    until it is edited, or gets its turn in the operator's fleet rollout."""
    url: str | None = None
    """Base URL of the OpenAI API inside the cluster, independent of spec.expose."""
    model_name: str | None = None
    """The model's name in the OpenAI API."""
    replicas: int = 0
    """Replica groups with pods."""
    ready_replicas: int = 0
    """Replica groups whose pods are all ready."""
    ready: str = ""
    """Ready and desired replica groups, such as 1/2."""
    restarts: int = 0
    """Restarts of all replica groups, counted against their budgets."""
    selector: str = ""
    """Label selector of the first pod of each replica group, for the scale subresource."""
    leader: LeaderStatus | None = None
    """The leader pod, or the last one."""
    replica_groups: list[ReplicaGroupStatus] = Field(default=[])
    """The replica groups."""
    cache: CacheStatus | None = None
    """The model cache, if the resource has one."""
    conditions: list[Condition] = Field(
        default=[],
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Ready, Available, Progressing, Paused, Suspended, Degraded and Failed; with a model cache also Cached."""

    def condition(self, kind: ConditionType) -> Condition | None:
        """The condition of this type, if it exists."""
        return next((condition for condition in self.conditions if condition.type == kind), None)
