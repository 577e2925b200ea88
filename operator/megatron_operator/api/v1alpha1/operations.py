"""Scheduling, replacement, draining and customization of the pods."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from megatron_operator.api.quantity import Duration
from megatron_operator.api.v1alpha1.base import (
    Boolean,
    DnsName,
    FieldPath,
    Integer,
    LabelKey,
    LabelValue,
    Part,
    misplaced,
)


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


class Gang(StrEnum):
    """Which scheduler places the pods of a replica group together or not at all."""

    AUTO = "Auto"
    NONE = "None"
    KUBERNETES = "Kubernetes"
    SCHEDULER_PLUGINS = "SchedulerPlugins"
    VOLCANO = "Volcano"


class TopologyMode(StrEnum):
    """How strictly the pods of a replica group share a topology domain."""

    REQUIRED = "Required"
    PREFERRED = "Preferred"


class GroupTopology(Part):
    """A topology domain that the pods of a replica group share, such as a rack."""

    key: LabelKey
    """Label of nodes whose value names the domain, such as cloud.provider.com/topology-rack."""
    mode: TopologyMode = TopologyMode.REQUIRED
    """Required: the pods wait until one domain has room for them. Preferred: they may run in several domains."""


class TolerationOperator(StrEnum):
    """How a toleration compares the value of a taint."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    """What a taint does to pods that do not tolerate it."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(Part):
    """A taint that does not keep the pods from a node, as in a pod's spec."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "has(self.key) || self.operator == 'Exists'",
                    "message": "spec.scheduling.tolerations: a toleration without a key needs operator Exists; set a"
                    " key or that operator",
                },
                {
                    "rule": "!has(self.value) || self.operator == 'Equal'",
                    "message": "spec.scheduling.tolerations: operator Exists compares no value; remove the value, or"
                    " set operator Equal",
                },
                {
                    "rule": "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
                    "message": "spec.scheduling.tolerations: tolerationSeconds applies to effect NoExecute; set that"
                    " effect, or remove tolerationSeconds",
                },
            ]
        }
    )

    key: LabelKey | None = None
    """Key of the taint. Default: all taints, with operator Exists."""
    operator: TolerationOperator = TolerationOperator.EQUAL
    """Equal compares the value too, Exists only the key."""
    value: LabelValue | None = None
    """Value of the taint, with operator Equal."""
    effect: TaintEffect | None = None
    """Effect of the taint: NoSchedule, PreferNoSchedule or NoExecute. Default: all effects."""
    toleration_seconds: Annotated[Integer, Field(ge=0, le=2**31)] | None = None
    """Seconds that a pod stays on a node after the taint with effect NoExecute was added. Default: for ever."""

    @model_validator(mode="after")
    def _fields_fit_the_operator(self) -> Self:
        exists = self.operator is TolerationOperator.EXISTS
        if self.key is None and not exists:
            raise misplaced("operator", self.operator.value, "needs a key; add the key, or set the operator to Exists")
        if self.value is not None and exists:
            raise misplaced("value", self.value, "has no meaning with operator Exists; remove it")
        if self.toleration_seconds is not None and self.effect is not TaintEffect.NO_EXECUTE:
            raise misplaced(
                "tolerationSeconds", self.toleration_seconds, "needs effect NoExecute; set it, or remove this"
            )
        return self


class Scheduling(Part):
    """Scheduling of the pods."""

    node_selector: dict[str, LabelValue] = Field(default={})
    """Labels of the nodes that pods may run on."""
    tolerations: list[Toleration] = Field(default=[], max_length=32)
    """Taints of nodes that do not keep the pods away."""

    priority_class_name: DnsName | None = None
    """PriorityClass of the pods."""
    queue_name: Annotated[DnsName, Field(max_length=63)] | None = None
    """LocalQueue of Kueue. It admits the pods of a replica group together, as a group of plain pods."""
    scheduler_name: Annotated[DnsName, Field(max_length=63)] | None = None
    """Scheduler of the pods. Default: volcano for gang Volcano, scheduler-plugins-scheduler for gang SchedulerPlugins,
    otherwise the cluster's default scheduler."""
    gang: Gang = Gang.AUTO
    """What places the pods of a replica group of several pods together or not at all: Kubernetes (PodGroups of
    scheduling.k8s.io, from 1.36 on, or Workloads in 1.35, both behind feature gates), SchedulerPlugins (PodGroups of
    the coscheduling plugin), Volcano (its PodGroups), or None. Auto: Kubernetes where the cluster serves that API,
    otherwise None. See also failurePolicy.gangTimeout."""
    group_topology: GroupTopology | None = None
    """Domain that the pods of each replica group share. With queueName, Kueue's topology-aware scheduling selects a
    domain with room for all of them; the queue's ResourceFlavor must have a Topology with this label. Otherwise they
    attract each other, and the pod that is scheduled first selects the domain."""
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
    gang_timeout: Duration = Duration("10m")
    """A replica group of which some pods have nodes and others have found none for this long, or up to twice as long,
    gives its nodes back to other replica groups for a minute, one group of a resource at a time. It does not count
    against maxRestarts. 0s: never."""
    transition_timeout: Duration = Duration("2m")
    """A pause, suspend, resume or unpause that takes longer is reported as Degraded."""


class RolloutSpec(Part):
    """How running pods are replaced."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "!has(self.maxUnavailable) || !has(self.maxSurge)"
                    " || self.maxUnavailable + self.maxSurge > 0",
                    "message": "spec.rollout.maxUnavailable: no replica group could be replaced, because maxSurge is 0"
                    " too; set one of them to 1 or more",
                }
            ]
        }
    )

    drain_timeout: Duration = Duration("60s")
    """Time for a pod to finish its requests before it ends. A change restarts no pods; it takes full effect for pods
    that start later."""
    max_unavailable: Annotated[Integer, Field(ge=0, le=1024)] | None = None
    """Replica groups that a rollout may make unavailable at a time: it never leaves fewer ready groups than replicas
    minus this number. Default: 0 with a maxSurge of at least 1, otherwise 1."""
    max_surge: Annotated[Integer, Field(ge=0, le=1024)] | None = None
    """Replica groups that run beyond replicas during a rollout, so that a group is replaced when another one is ready.
    They need room on the nodes. Default: 1 with a maxUnavailable of 0; without maxUnavailable 1 for pods.device cpu and
    0 for cuda, where all GPUs may be in use; otherwise 0."""
    paused: Boolean = False
    """Replace no running replica group. A group that fails starts with the current template all the same."""
    partition: Annotated[Integer, Field(ge=0, le=1024)] = 0
    """Replica groups with an index below this number are not replaced, for a canary. One that fails starts with the
    current template all the same."""

    @model_validator(mode="after")
    def _a_group_can_be_replaced(self) -> Self:
        if self.max_unavailable == 0 and self.max_surge == 0:
            message = (
                "lets the rollout replace no replica group, because maxSurge is 0 too; set one of them to 1 or more"
            )
            raise misplaced("maxUnavailable", 0, message)
        return self


class CordonedNodesPolicy(StrEnum):
    """What happens to replica groups on a cordoned node."""

    HONOR = "Honor"
    IGNORE = "Ignore"


class DisruptionSpec(Part):
    """Drains of nodes, and evictions."""

    max_unavailable: Annotated[Integer, Field(ge=0, le=1024)] | None = None
    """Replica groups that evictions may make unavailable at a time, by a PodDisruptionBudget. With 0, evictions wait
    until the operator has moved the group. Default: 0 if the operator moves groups from cordoned nodes, otherwise 1."""
    cordoned_nodes_policy: CordonedNodesPolicy = CordonedNodesPolicy.HONOR
    """Honor: a replica group on a cordoned node is replaced by one on another node, which starts first. Ignore: it
    stays until its pods are evicted. Pods that tolerate the taint node.kubernetes.io/unschedulable always stay."""
    scheduling_timeout: Duration = Duration("1m")
    """Time for the pods of such a successor to be scheduled. After that, no other node has room: the groups on
    cordoned nodes drain and end without a successor."""


class AutoSuspendSpec(Part):
    """Suspends an idle engine to release its memory, and stops the pods of one that stays idle."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "duration(self.stopAfter) == duration('0s') || duration(self.idleAfter) > duration('0s')",
                    "message": "spec.autoSuspend.stopAfter: counts from the suspension, but idleAfter is 0s; set"
                    " idleAfter, or remove stopAfter",
                }
            ]
        }
    )

    idle_after: Duration = Duration("0s")
    """Time without a request after which a running engine is suspended. The next request resumes it and waits
    meanwhile. 0s: never."""
    stop_after: Duration = Duration("0s")
    """Time from this suspension after which the pods are stopped, so that their GPUs are free. The next request through
    the activator starts them and waits meanwhile. 0s, or without an activator: never."""

    @model_validator(mode="after")
    def _stop_follows_a_suspension(self) -> Self:
        if self.stop_after > 0 and not self.idle_after:
            message = "counts from the suspension, but idleAfter is 0s; set idleAfter, or remove stopAfter"
            raise misplaced("stopAfter", self.stop_after.text, message)
        return self


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
    remove: list[FieldPath] = Field(default=[], max_length=32)
    """Fields to remove from the rendered pod before spec is merged, like securityContext.runAsUser, affinity or
    containers.megatron.resources.limits; items of lists are named by their name. Unlike a null in spec, which kubectl
    apply and API servers drop, an entry stays."""
    spec: dict[str, Any] = Field(default={}, json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})
    """A partial pod spec. Containers (the main one is named megatron), volumes and environment variables are merged by
    name, volume mounts by mountPath; tolerations are appended; other lists are replaced."""
