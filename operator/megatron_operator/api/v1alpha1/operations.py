"""How the pods are scheduled, replaced, drained and customised."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from megatron_operator.api.quantity import Duration
from megatron_operator.api.v1alpha1.base import DnsName, Integer, LabelKey, Part


class Lifecycle(StrEnum):
    """The state that the user wishes for."""

    RUNNING = "Running"
    PAUSED = "Paused"
    SUSPENDED = "Suspended"
    STOPPED = "Stopped"


class ImagePullPolicy(StrEnum):
    """When the kubelet fetches an image."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class Scheduling(Part):
    """Where and how urgently the pods are placed."""

    priority_class_name: DnsName | None = None
    """PriorityClass of the pods."""
    queue_name: Annotated[DnsName, Field(max_length=63)] | None = None
    """LocalQueue of Kueue: the pods of a group are admitted together, as a group of plain pods."""
    topology_key: LabelKey | None = None
    """Label of nodes, such as topology.kubernetes.io/zone: groups are spread over its values, as evenly as there is
    room, and the pods of one group are placed where its first pod is. Without it groups only avoid each other's
    nodes."""


class FailurePolicy(Part):
    """What happens when a replica group fails. Each group has a budget of its own."""

    max_restarts: Annotated[Integer, Field(ge=0, le=1000)] = 5
    """Restarts of a group before it is given up; editing the spec's template or restart.id refills the budget."""
    reset_after: Duration = Duration("1h")
    """A group that lived this long before it failed has its whole budget again."""
    backoff: Duration = Duration("10s")
    """Pause before a group's first restart; it doubles with each further one."""
    max_backoff: Duration = Duration("5m")
    """Longest pause before a restart."""
    startup_timeout: Duration = Duration("30m")
    """A group whose pods are placed on nodes but not ready for this long is restarted."""
    transition_timeout: Duration = Duration("2m")
    """A pause, suspend, resume or unpause that takes longer is reported as Degraded."""


class Rollout(Part):
    """How running pods are replaced."""

    drain_timeout: Duration = Duration("60s")
    """Time that a pod gets to finish its requests before it ends."""


class AutoSuspend(Part):
    """A model that nobody asks anything gives its memory back."""

    idle_after: Duration = Duration("0s")
    """Time without a request after which a running engine is suspended; the next request wakes it, and waits meanwhile.
    0s: never."""


class Restart(Part):
    """Asks for a restart without another change."""

    id: Annotated[str, Field(max_length=253)] = ""
    """Change it to restart all groups, one after the other."""


class PodTemplateMetadata(Part):
    """Labels and annotations added to every pod."""

    labels: dict[str, str] = Field(default={})
    """Labels; those of the operator win."""
    annotations: dict[str, str] = Field(default={})
    """Annotations; those of the operator win."""


class PodTemplate(Part):
    """Overrides for every pod, merged over what the operator renders."""

    metadata: PodTemplateMetadata = PodTemplateMetadata()
    """Labels and annotations added to every pod."""
    spec: dict[str, Any] = Field(default={}, json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})
    """A partial pod spec. Containers (the main one is called megatron), volumes and environment variables are merged by
    name, volume mounts by mountPath; tolerations are added; other lists are replaced; a null removes a field."""
