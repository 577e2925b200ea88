"""``status``: what the operator reports."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from megatron_operator.api.v1alpha1.base import Report


class Phase(StrEnum):
    """The one word for people; programs read the conditions."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    PAUSED = "Paused"
    SUSPENDED = "Suspended"
    STOPPED = "Stopped"
    DEGRADED = "Degraded"
    FAILED = "Failed"
    TERMINATING = "Terminating"


class ConditionType(StrEnum):
    """Types of conditions; every resource has all of them."""

    READY = "Ready"
    AVAILABLE = "Available"
    PROGRESSING = "Progressing"
    PAUSED = "Paused"
    SUSPENDED = "Suspended"
    DEGRADED = "Degraded"
    FAILED = "Failed"


ConditionStatus = Literal["True", "False", "Unknown"]


class Condition(Report):
    """One aspect of the state, in the manner of Kubernetes."""

    type: str
    """Ready, Available, Progressing, Paused, Suspended, Degraded or Failed."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: str
    """One CamelCase word for the cause."""
    message: str = ""
    """The cause in words: what is waited for, and why."""
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When the status last changed."""
    observed_generation: int = 0
    """Generation of the spec that the condition is about."""


class LastFailure(Report):
    """Why an attempt of a group ended."""

    attempt: int = 0
    """The attempt that ended."""
    pod: str = ""
    """The pod that ended it."""
    rank: int | None = None
    """The rank that ended it, where it is known."""
    exit_code: int | None = None
    """The exit code of the process, where it is known."""
    reason: str = ""
    """One CamelCase word for the cause."""
    message: str = ""
    """The cause in words, as the pod reported it."""
    time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When it ended."""


class ReplicaGroupStatus(Report):
    """One replica group."""

    index: int
    """Number of the group, from 0."""
    attempt: int | None = None
    """The latest attempt that was seen; part of the pods' names."""
    template_hash: str | None = None
    """The template that the attempt was made from."""
    ready_pods: int = 0
    """Pods of the attempt that are ready."""
    total_pods: int = 0
    """Pods that the group has when complete."""
    restarts: int = 0
    """Restarts counted against the budget."""
    last_failure: LastFailure | None = None
    """Why the latest failed attempt ended."""


class LeaderStatus(Report):
    """The pod that runs the coordinator."""

    pod: str = ""
    """Its name."""
    replica_group: int = 0
    """Index of its replica group."""
    epoch: int = 0
    """Number of the decision by which it leads; grows with each that follows."""


class Status(Report):
    """The observed state of a MegatronInference."""

    observed_generation: int = 0
    """Generation of the spec that this status is about."""
    phase: Phase = Phase.PENDING
    """Pending, Starting, Running, Paused, Suspended, Stopped, Degraded, Failed or Terminating."""
    engine_state: str | None = None
    """State of the engine as the leader reports it: RUNNING, PAUSED, SUSPENDED, or one in between."""
    engine_state_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = None
    """Since when the engine is in that state."""
    url: str | None = None
    """Base URL of the OpenAI API inside the cluster, whatever names spec.expose gives it outside."""
    model_name: str | None = None
    """The model's name in the OpenAI API."""
    replicas: int = 0
    """Replica groups that have pods."""
    ready_replicas: int = 0
    """Replica groups whose pods are all ready."""
    ready: str = ""
    """Ready groups of wished groups, for people."""
    restarts: int = 0
    """Restarts of all groups, counted against their budgets."""
    selector: str = ""
    """Label selector of the first pod of each group, for the scale subresource."""
    leader: LeaderStatus | None = None
    """The pod that leads, or did last."""
    replica_groups: list[ReplicaGroupStatus] = Field(default=[])
    """The replica groups."""
    conditions: list[Condition] = Field(
        default=[],
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Ready, Available, Progressing, Paused, Suspended, Degraded and Failed."""

    def condition(self, kind: ConditionType) -> Condition | None:
        """The condition of this type, if it was ever set."""
        return next((condition for condition in self.conditions if condition.type == kind), None)
