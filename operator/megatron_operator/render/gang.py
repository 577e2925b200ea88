"""Gang scheduling: the object of an attempt, and the fields of its pods, by which a scheduler places them together.

One object per attempt, with the name of the attempt, so that the pods of an earlier attempt do not count.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megatron_operator import names
from megatron_operator.api.v1alpha1 import Gang, MegatronInference
from megatron_operator.names import PodIdentity
from megatron_operator.render.metadata import child_metadata, with_applied_hash

KINDS = {
    Gang.KUBERNETES: names.POD_GROUP,
    Gang.SCHEDULER_PLUGINS: names.SCHEDULER_PLUGINS_POD_GROUP,
    Gang.VOLCANO: names.VOLCANO_POD_GROUP,
}
SCHEDULERS = {Gang.SCHEDULER_PLUGINS: "scheduler-plugins-scheduler", Gang.VOLCANO: "volcano"}
"""Schedulers as the charts of these projects name them."""
SCHEDULER_PLUGINS_LABEL = "scheduling.x-k8s.io/pod-group"
VOLCANO_ANNOTATION = "scheduling.k8s.io/group-name"
WORKLOAD_PODS = "pods"
"""Name of the only pod group of a Workload."""


def gang_kind(resource: MegatronInference, served: Collection[str]) -> str | None:
    """The kind of the gang objects of a resource; None where its pods are scheduled one by one.

    ``served`` are those of ``names.GANG_KINDS`` that the cluster has. Kubernetes 1.35 has Workloads, 1.36 PodGroups.
    """
    gang = resource.spec.scheduling.gang
    if resource.spec.pods_per_group == 1 or gang is Gang.NONE:
        return None
    if gang in (Gang.SCHEDULER_PLUGINS, Gang.VOLCANO):
        return KINDS[gang]
    native = next((kind for kind in (names.POD_GROUP, names.WORKLOAD) if kind in served), None)
    return KINDS[Gang.KUBERNETES] if native is None and gang is Gang.KUBERNETES else native


def gang_object(resource: MegatronInference, kind: str, group: int, attempt: int) -> dict[str, Any]:
    """The PodGroup or Workload of an attempt of a replica group."""
    size, name = resource.spec.pods_per_group, names.attempt_name(resource.name, group, attempt)
    policy = {"gang": {"minCount": size}}
    spec: dict[str, Any] = {"minMember": size}
    if kind == names.POD_GROUP:
        spec = {"schedulingPolicy": policy}
    if kind == names.WORKLOAD:
        spec = {"podGroups": [{"name": WORKLOAD_PODS, "policy": policy}]}
    if kind == names.VOLCANO_POD_GROUP and (priority := resource.spec.scheduling.priority_class_name) is not None:
        spec["priorityClassName"] = priority
    return with_applied_hash({**names.gang_type(kind), "metadata": child_metadata(resource, name), "spec": spec})


def scheduler_name(resource: MegatronInference) -> str | None:
    """The scheduler of the pods; None for the default scheduler of the cluster."""
    scheduling = resource.spec.scheduling
    return scheduling.scheduler_name or SCHEDULERS.get(scheduling.gang)


def gang_labels(resource: MegatronInference, identity: PodIdentity, kind: str | None) -> dict[str, str]:
    """Labels of a pod of a gang."""
    name = names.attempt_name(resource.name, identity.group, identity.attempt)
    return {SCHEDULER_PLUGINS_LABEL: name} if kind == names.SCHEDULER_PLUGINS_POD_GROUP else {}


def gang_annotations(resource: MegatronInference, identity: PodIdentity, kind: str | None) -> dict[str, str]:
    """Annotations of a pod of a gang."""
    name = names.attempt_name(resource.name, identity.group, identity.attempt)
    return {VOLCANO_ANNOTATION: name} if kind == names.VOLCANO_POD_GROUP else {}


def gang_spec(resource: MegatronInference, identity: PodIdentity, kind: str | None) -> dict[str, Any]:
    """The part of a pod's spec that refers to the object of its gang."""
    name = names.attempt_name(resource.name, identity.group, identity.attempt)
    if kind == names.POD_GROUP:
        return {"schedulingGroup": {"podGroupName": name}}
    return {"workloadRef": {"name": name, "podGroup": WORKLOAD_PODS}} if kind == names.WORKLOAD else {}
