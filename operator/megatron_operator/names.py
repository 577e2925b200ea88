"""Labels, annotations, ports, child names and hashes. No other module spells them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_operator.api.v1alpha1 import CPU_KV_CACHE, GROUP, MegatronInference

MANAGER = "megatron-operator"
"""Field manager of server-side apply, and the value of app.kubernetes.io/managed-by."""

HTTP_PORT = 8000
CONTROL_PORT = 9000
METRICS_PORT = 9001
COORDINATOR_PORT = 5557
RENDEZVOUS_PORT = 29500

CONTAINER = "megatron"
USER = 65532
"""An unprivileged user id that nodes do not use."""
TERMINATION_LOG = "/dev/termination-log"

COORDINATOR_KEY = "coordinator-key"
CONTROL_TOKEN = "control-token"
SECRET_KEYS = (COORDINATOR_KEY, CONTROL_TOKEN)

NAME_LABEL = f"{GROUP}/name"
GROUP_LABEL = f"{GROUP}/replica-group"
ATTEMPT_LABEL = f"{GROUP}/attempt"
INDEX_LABEL = f"{GROUP}/index"
ROLE_LABEL = f"{GROUP}/role"
TEMPLATE_HASH_LABEL = f"{GROUP}/template-hash"
RESTARTS_ANNOTATION = f"{GROUP}/restarts"
EPOCH_ANNOTATION = f"{GROUP}/leader-epoch"
"""Epoch of the last decision that made the pod the leader."""
DEFAULT_IMAGE_ANNOTATION = f"{GROUP}/default-image"
"""The operator's default image at the pod's creation, on pods of resources that name no image."""
APPLIED_HASH_ANNOTATION = f"{GROUP}/applied-hash"

CACHE_LABEL = f"{GROUP}/model-cache"
"""The resource's name, on pods that fill its model cache. They have no other label of the resource, so that Services,
budgets and affinities do not select them."""
CACHED_SOURCE_ANNOTATION = f"{GROUP}/cached-source"
"""Hash of the source that a pod reads from the model cache, or that a Job fills it with or removes from it."""
CACHE_NODE_ANNOTATION = f"{GROUP}/cache-node"
"""Node whose folder a download Job fills."""
OWNER_ANNOTATION = f"{GROUP}/owner-uid"
"""The resource's uid, on Jobs that fill a shared cache. Without an ownerReference they outlive the resource."""
UNUSED_LABEL = f"{GROUP}/unused-model"
"""On Jobs of a model that nothing uses: ``recorded``, or ``evicted`` for the Job that removes it."""
RECORDED = "recorded"
EVICTED = "evicted"

JOB = "Job"
CLAIM = "PersistentVolumeClaim"
CACHE_KINDS = (JOB, CLAIM)
"""Kinds of children that belong to a model cache."""

LEADER = "leader"
WORKER = "worker"

POD_GROUP = "PodGroup.scheduling.k8s.io"
WORKLOAD = "Workload.scheduling.k8s.io"
SCHEDULER_PLUGINS_POD_GROUP = "PodGroup.scheduling.x-k8s.io"
VOLCANO_POD_GROUP = "PodGroup.scheduling.volcano.sh"
GANG_KINDS = {
    POD_GROUP: "scheduling.k8s.io/v1alpha2",
    WORKLOAD: "scheduling.k8s.io/v1alpha1",
    SCHEDULER_PLUGINS_POD_GROUP: "scheduling.x-k8s.io/v1alpha1",
    VOLCANO_POD_GROUP: "scheduling.volcano.sh/v1beta1",
}
"""Kinds of children that make a scheduler place the pods of an attempt together, each with its API group, because
several have the kind PodGroup, and with its API version."""

BUDGET = "PodDisruptionBudget"
BUDGET_V1BETA1 = "PodDisruptionBudget.v1beta1"
BUDGET_KINDS = {BUDGET: "policy/v1", BUDGET_V1BETA1: "policy/v1beta1"}
"""Kinds of PodDisruptionBudgets with their API versions, the preferred one first. Kubernetes has policy/v1 from 1.21
on."""

ROUTE_KINDS = ("HTTPRoute", "InferencePool", "Ingress")
"""Kinds of children that route external clients to the frontends. Pods do not depend on them."""


@dataclass(frozen=True)
class PodIdentity:
    """A pod's identity, as its labels and annotations have it."""

    group: int
    attempt: int
    index: int
    leader: bool
    template_hash: str
    restarts: int
    epoch: int = 0
    """Epoch of the last decision that made the pod the leader."""


def pod_name(resource: str, group: int, attempt: int, index: int) -> str:
    """Name and host name of a pod; a new attempt never reuses the name of an old one."""
    return f"{attempt_name(resource, group, attempt)}-{index}"


def attempt_name(resource: str, group: int, attempt: int) -> str:
    """Name of an attempt of a replica group: the common part of its pods' names."""
    return f"{resource}-{group}-{attempt}"


def http_service(resource: str) -> str:
    """Name of the Service for clients of the OpenAI API."""
    return resource


def coordinator_service(resource: str) -> str:
    """Name of the headless Service behind the coordinator's address."""
    return f"{resource}-coordinator"


def pods_service(resource: str) -> str:
    """Name of the headless Service behind the pods' host names."""
    return f"{resource}-pods"


def services(resource: str) -> tuple[str, str, str]:
    """Names of all Services."""
    return http_service(resource), coordinator_service(resource), pods_service(resource)


def keys_secret(resource: str) -> str:
    """Name of the Secret with the coordinator's key and the control token."""
    return f"{resource}-keys"


def network_policy(resource: str) -> str:
    """Name of the NetworkPolicy."""
    return resource


def disruption_budget(resource: str) -> str:
    """Name of the PodDisruptionBudget."""
    return resource


def route(resource: str) -> str:
    """Name of the Ingress, HTTPRoute or InferencePool."""
    return resource


def cached_source(resource: MegatronInference) -> str:
    """Hash of the source of the model, which is also the name of its folder in a cache."""
    source = resource.spec.model.source
    return hash_of(source.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=CREDENTIALS))


def download_job(resource: MegatronInference, node: str | None) -> str:
    """Name of the Job that fills the model cache of a node, or of a volume claim."""
    return f"{resource.name}-cache-{hash_of([cached_source(resource), _cache_place(resource), node])}"


def cache_claim(resource: MegatronInference) -> str:
    """Name of the claim that the operator creates for the model cache; another source gets another claim."""
    return f"{resource.name}-cache-{hash_of([cached_source(resource), _cache_place(resource)])}"


def unused_model(state: str, place: Any) -> str:
    """Name of a Job of a model that nothing uses. ``state``: its value of ``UNUSED_LABEL``."""
    return f"model-cache-{state}-{hash_of(place)}"


def _cache_place(resource: MegatronInference) -> Any:
    cache = resource.spec.model.cache
    if cache is None:
        return None
    return cache.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude={"host_path": NODES, "volume_claim": {"size"}}
    )


def job_child(job: str) -> str:
    """A Job's key in ``ObservedState.children``."""
    return f"{JOB}/{job}"


def keys_child(resource: str) -> str:
    """The Secret's key in ``ObservedState.children``."""
    return f"Secret/{keys_secret(resource)}"


def http_host(resource: str, namespace: str) -> str:
    """DNS name of the HTTP Service."""
    return f"{http_service(resource)}.{namespace}.svc"


def coordinator_host(resource: str, namespace: str) -> str:
    """DNS name under which engines and frontends find the coordinator."""
    return f"{coordinator_service(resource)}.{namespace}.svc"


def pod_host(pod: str, resource: str, namespace: str) -> str:
    """DNS name of a pod."""
    return f"{pod}.{pods_service(resource)}.{namespace}.svc"


def url(resource: str, namespace: str) -> str:
    """Base URL of the OpenAI API inside the cluster."""
    return f"http://{http_host(resource, namespace)}:{HTTP_PORT}/v1"


def kind_of(manifest: Mapping[str, Any]) -> str:
    """The kind of an object, followed by its API group or version if the operator uses several of them."""
    api_version = str(manifest.get("apiVersion", ""))
    if api_version == BUDGET_KINDS[BUDGET_V1BETA1]:
        return BUDGET_V1BETA1
    group, _, _ = api_version.rpartition("/")
    with_group = f"{manifest['kind']}.{group}"
    return with_group if with_group in GANG_KINDS else str(manifest["kind"])


def gang_type(kind: str) -> dict[str, str]:
    """``apiVersion`` and ``kind`` of an object of one of ``GANG_KINDS``."""
    return {"apiVersion": GANG_KINDS[kind], "kind": kind.partition(".")[0]}


def child_key(manifest: Mapping[str, Any]) -> str:
    """``Kind/name``, the key of ``ObservedState.children``."""
    return f"{kind_of(manifest)}/{manifest['metadata']['name']}"


def selector_labels(resource: str) -> dict[str, str]:
    """Labels that every child of the resource carries, and that select them."""
    return {NAME_LABEL: resource, "app.kubernetes.io/managed-by": MANAGER}


def child_labels(resource: str) -> dict[str, str]:
    """All labels of a child."""
    return {
        **selector_labels(resource),
        "app.kubernetes.io/name": "megatron-inference",
        "app.kubernetes.io/instance": resource,
    }


def leader_labels(resource: str) -> dict[str, str]:
    """Labels that select the leader pod."""
    return {NAME_LABEL: resource, ROLE_LABEL: LEADER}


def frontend_labels(resource: str) -> dict[str, str]:
    """Labels that select the pods with an HTTP frontend: the first pod of every replica group."""
    return {NAME_LABEL: resource, INDEX_LABEL: "0"}


def role_metadata(leader: bool, epoch: int | None) -> dict[str, dict[str, str]]:
    """Labels and annotations for a role; without an ``epoch`` the annotation is unchanged."""
    labels = {ROLE_LABEL: LEADER if leader else WORKER}
    return {"labels": labels, "annotations": {} if epoch is None else {EPOCH_ANNOTATION: str(epoch)}}


def scale_selector(resource: str) -> str:
    """Selector of one pod per replica group, as text for the scale subresource."""
    return f"{NAME_LABEL}={resource},{INDEX_LABEL}=0"


def pod_identity(metadata: Mapping[str, Any]) -> PodIdentity | None:
    """Identity from a pod's metadata; None for a pod that does not have the operator's labels."""
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    try:
        return PodIdentity(
            group=int(labels[GROUP_LABEL]),
            attempt=int(labels[ATTEMPT_LABEL]),
            index=int(labels[INDEX_LABEL]),
            leader=labels.get(ROLE_LABEL) == LEADER,
            template_hash=labels.get(TEMPLATE_HASH_LABEL, ""),
            restarts=int(annotations.get(RESTARTS_ANNOTATION, "0")),
            epoch=int(annotations.get(EPOCH_ANNOTATION, "0")),
        )
    except (KeyError, ValueError):
        return None


def applied_hash(metadata: Mapping[str, Any]) -> str:
    """The hash annotation of a child, for ``ObservedState.children``; empty when it has none."""
    return str((metadata.get("annotations") or {}).get(APPLIED_HASH_ANNOTATION, ""))


def hash_of(value: Any) -> str:
    """A short hash of JSON-like data, stable across processes and valid as a label value."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


CREDENTIALS: Any = {"hugging_face": {"token_secret"}, "object_storage": {"credentials_secret"}}
"""Fields of a source that do not choose what is downloaded."""
NODES = {"nodes", "node_selector"}
"""Fields of a node-local cache that do not choose its folder."""

NO_RESTART = {
    "replicas",
    "lifecycle",
    "expose",
    "disruption",
    "failure_policy",
    "image",
    "image_pull_policy",
    "rollout",
}
"""Fields of the spec that replace no pods; ``image`` is part of the hash by itself."""


def template_hash(resource: MegatronInference, image: str) -> str:
    """Changes exactly when running pods have to be replaced.

    It covers only fields that differ from their defaults, so that an upgrade of the operator that adds fields replaces
    no pods. The size of the KV cache counts as the pods get it: 1Gi was the default on all devices, and stored
    resources have it.
    """
    spec = resource.spec.model_dump(
        mode="json",
        by_alias=True,
        exclude_defaults=True,
        exclude=NO_RESTART,
    )
    spec.get("autoSuspend", {}).pop("stopAfter", None)
    cache = spec.get("model", {}).get("cache", {})
    for place, field in (("hostPath", "nodes"), ("hostPath", "nodeSelector"), ("volumeClaim", "size")):
        cache.get(place, {}).pop(field, None)
    engine = spec.pop("engine", {})
    if resource.spec.kv_cache_memory == CPU_KV_CACHE:
        engine.pop("kvCacheMemory", None)
    elif resource.spec.kv_cache_memory is None:
        engine["kvCacheMemory"] = None
    return hash_of({"spec": spec | ({"engine": engine} if engine else {}), "image": image})
