"""Scheduling, replacement, draining and customization of the pods."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from megatron_operator.api.quantity import Duration
from megatron_operator.api.v1alpha1.base import DnsName, Integer, LabelKey, Part


class Lifecycle(StrEnum):
    """The desired lifecycle state."""

    RUNNING = "Running"
    PAUSED = "Paused"
    SUSPENDED = "Suspended"
    STOPPED = "Stopped"


class ImagePullPolicy(StrEnum):
    """When the kubelet pulls an image."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class Scheduling(Part):
    """Scheduling of the pods."""

    priority_class_name: DnsName | None = None
    """PriorityClass of the pods."""
    queue_name: Annotated[DnsName, Field(max_length=63)] | None = None
    """LocalQueue of Kueue. It admits the pods of a replica group together, as a group of plain pods."""
    topology_key: LabelKey | None = None
    """Label of nodes, such as topology.kubernetes.io/zone. Replica groups are spread over its values as evenly as
    possible, and the pods of a group share one value. Default: groups only prefer different nodes."""


class FailurePolicy(Part):
    """What happens when a replica group fails. Each group has its own budget."""

    max_restarts: Annotated[Integer, Field(ge=0, le=1000)] = 5
    """Restarts of a replica group before the operator gives up. An edit of the spec's template or of restart.id resets
    the budget."""
    reset_after: Duration = Duration("1h")
    """A replica group that ran this long before it failed gets its whole budget back."""
    backoff: Duration = Duration("10s")
    """Delay before the first restart of a replica group; it doubles with each further restart."""
    max_backoff: Duration = Duration("5m")
    """Maximum delay before a restart."""
    startup_timeout: Duration = Duration("30m")
    """A replica group that is scheduled but not ready for this long is restarted. The time begins when its last pod is
    scheduled, and again when an init container ends or the containers start. Waiting for a node or a queue does not
    count."""
    transition_timeout: Duration = Duration("2m")
    """A pause, suspend, resume or unpause that takes longer is reported as Degraded."""


class Rollout(Part):
    """How running pods are replaced."""

    drain_timeout: Duration = Duration("60s")
    """Time for a pod to finish its requests before it ends."""


class AutoSuspend(Part):
    """Suspends an idle engine to release its memory."""

    idle_after: Duration = Duration("0s")
    """Time without a request after which a running engine is suspended. The next request resumes it and waits
    meanwhile. 0s: never."""


class Restart(Part):
    """Requests a restart without another change."""

    id: Annotated[str, Field(max_length=253)] = ""
    """Change it to restart all replica groups, one after the other."""


class PodTemplateMetadata(Part):
    """Labels and annotations added to every pod."""

    labels: dict[str, str] = Field(default={})
    """Labels; the operator's own take precedence."""
    annotations: dict[str, str] = Field(default={})
    """Annotations; the operator's own take precedence."""


class PodTemplate(Part):
    """Overrides for every pod, merged over the rendered pod."""

    metadata: PodTemplateMetadata = PodTemplateMetadata()
    """Labels and annotations added to every pod."""
    spec: dict[str, Any] = Field(default={}, json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})
    """A partial pod spec. Containers (the main one is named megatron), volumes and environment variables are merged by
    name, volume mounts by mountPath; tolerations are appended; other lists are replaced; null removes a field."""
