"""Placement of pods: affinity within a replica group, anti-affinity between groups, and an optional queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_operator import kueue, names
from megatron_operator.api.v1alpha1 import MegatronInference, TopologyMode
from megatron_operator.names import PodIdentity
from megatron_operator.render.gang import scheduler_name

HOSTNAME = "kubernetes.io/hostname"
"""Label with the name of the node."""

QUEUED_TOPOLOGY_ANNOTATIONS = {
    TopologyMode.REQUIRED: kueue.REQUIRED_TOPOLOGY_ANNOTATION,
    TopologyMode.PREFERRED: kueue.PREFERRED_TOPOLOGY_ANNOTATION,
}


def placement(resource: MegatronInference, identity: PodIdentity) -> dict[str, Any]:
    """The scheduling part of a pod's spec.

    The first pods of the groups are spread over the domains of ``topologyKey``. All pods of a group attract each other
    into one domain, so that any of them can be scheduled first: a required affinity to pods that match the pod itself
    holds while there are none. Pods of different groups prefer different nodes, to limit the effect of a lost node.
    Preferences never keep a pod pending.
    """
    scheduling = resource.spec.scheduling
    affinity: dict[str, Any] = {"podAntiAffinity": _apart(resource, identity)}
    spec: dict[str, Any] = {"affinity": affinity}
    if scheduling.node_selector:
        spec["nodeSelector"] = dict(scheduling.node_selector)
    if scheduling.tolerations:
        spec["tolerations"] = [
            each.model_dump(mode="json", by_alias=True, exclude_none=True) for each in scheduling.tolerations
        ]
    if scheduling.priority_class_name is not None:
        spec["priorityClassName"] = scheduling.priority_class_name
    if (scheduler := scheduler_name(resource)) is not None:
        spec["schedulerName"] = scheduler
    if scheduling.topology_key is not None and identity.index == 0:
        spec["topologySpreadConstraints"] = [_spread(resource, scheduling.topology_key)]
    if together := _together(resource, identity):
        affinity["podAffinity"] = together
    return spec


def on_nodes(nodes: Sequence[str]) -> dict[str, Any]:
    """The affinity of a pod that can only run on these nodes; empty for all nodes."""
    fields = [{"key": "metadata.name", "operator": "In", "values": [node]} for node in nodes]
    if not fields:
        return {}
    terms = {"nodeSelectorTerms": [{"matchFields": [field]} for field in fields]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def queue_labels(resource: MegatronInference, identity: PodIdentity) -> dict[str, str]:
    """Labels by which Kueue admits the pods of an attempt together; empty without a queue."""
    queue = resource.spec.scheduling.queue_name
    if queue is None:
        return {}
    group = names.attempt_name(resource.name, identity.group, identity.attempt)
    return {kueue.QUEUE_LABEL: queue, kueue.GROUP_LABEL: group}


def queue_annotations(resource: MegatronInference) -> dict[str, str]:
    """Annotations for Kueue. An attempt that lost a pod is over, so that Kueue frees its quota."""
    if resource.spec.scheduling.queue_name is None:
        return {}
    counted = {kueue.COUNT_ANNOTATION: str(resource.spec.pods_per_group), kueue.RETRY_ANNOTATION: "false"}
    return {**counted, **_queued_topology(resource)}


def _queued_topology(resource: MegatronInference) -> dict[str, str]:
    """Annotations with which Kueue selects one domain for all pods of a group.

    Pods of a different shape are different sets for Kueue: the first pod, which has more ports, and the others. It
    joins two sets, so not those of a group whose last pod has fewer ranks than the others.
    """
    spec, topology = resource.spec, resource.spec.scheduling.group_topology
    if topology is None or spec.pods_per_group == 1:
        return {}
    annotations = {QUEUED_TOPOLOGY_ANNOTATIONS[topology.mode]: topology.key}
    shapes = {spec.ranks_in_pod(index) for index in range(1, spec.pods_per_group)}
    return annotations | ({kueue.SETS_ANNOTATION: resource.name} if len(shapes) == 1 else {})


def _apart(resource: MegatronInference, identity: PodIdentity) -> dict[str, Any]:
    others = {
        "matchLabels": {names.NAME_LABEL: resource.name},
        "matchExpressions": [{"key": names.GROUP_LABEL, "operator": "NotIn", "values": [str(identity.group)]}],
    }
    term = {"labelSelector": others, "topologyKey": HOSTNAME}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}


def _spread(resource: MegatronInference, topology_key: str) -> dict[str, Any]:
    return {
        "maxSkew": 1,
        "topologyKey": topology_key,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {names.NAME_LABEL: resource.name, names.INDEX_LABEL: "0"}},
    }


def _together(resource: MegatronInference, identity: PodIdentity) -> dict[str, Any]:
    """The affinity of a pod to all pods of its attempt, itself included; empty where nothing asks for it."""
    scheduling = resource.spec.scheduling
    if resource.spec.pods_per_group == 1:
        return {}
    required, preferred = [], []
    if scheduling.topology_key is not None:
        required.append(_beside_its_group(resource, identity, scheduling.topology_key))
    topology = scheduling.group_topology
    if topology is not None and scheduling.queue_name is None:
        term = _beside_its_group(resource, identity, topology.key)
        if topology.mode is TopologyMode.PREFERRED:
            preferred.append({"weight": 100, "podAffinityTerm": term})
        elif term not in required:
            required.append(term)
    terms = {
        "requiredDuringSchedulingIgnoredDuringExecution": required,
        "preferredDuringSchedulingIgnoredDuringExecution": preferred,
    }
    return {kind: each for kind, each in terms.items() if each}


def _beside_its_group(resource: MegatronInference, identity: PodIdentity, topology_key: str) -> dict[str, Any]:
    group = {
        names.NAME_LABEL: resource.name,
        names.GROUP_LABEL: str(identity.group),
        names.ATTEMPT_LABEL: str(identity.attempt),
    }
    return {"labelSelector": {"matchLabels": group}, "topologyKey": topology_key}
