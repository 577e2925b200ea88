"""A pod of an attempt of a replica group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron_operator import names
from megatron_operator.api.parse import InvalidResource
from megatron_operator.api.v1alpha1 import MegatronInference
from megatron_operator.names import PodIdentity
from megatron_operator.render.command import (
    API_KEYS_FILE,
    API_KEYS_MOUNT,
    CACHE_MOUNT,
    MODEL_MOUNT,
    PROGRAM,
    arguments,
    environment,
)
from megatron_operator.render.confinement import confined_container, unprivileged
from megatron_operator.render.gang import gang_annotations, gang_labels, gang_spec
from megatron_operator.render.merge import merged, without
from megatron_operator.render.metadata import child_metadata
from megatron_operator.render.model_cache import cached_mount, cached_volume
from megatron_operator.render.placement import on_nodes, placement, queue_annotations, queue_labels
from megatron_operator.render.resources import container_resources, pod_claims
from megatron_operator.settings import Settings

GRACE_BEYOND_DRAIN = 15
"""Seconds from the end of draining to the kubelet's SIGKILL."""


def image_of(resource: MegatronInference, settings: Settings) -> str:
    """The runtime image of this resource."""
    return resource.spec.image or settings.default_image(resource.spec.pods.device.value)


def grace_seconds(resource: MegatronInference) -> int:
    """Seconds from SIGTERM to SIGKILL."""
    return math.ceil(resource.spec.rollout.drain_timeout) + GRACE_BEYOND_DRAIN


def render_pod(
    resource: MegatronInference,
    identity: PodIdentity,
    settings: Settings,
    gang: str | None = None,
    filled_nodes: Sequence[str] = (),
) -> dict[str, Any]:
    """The pod's manifest; ``gang`` is the kind of its gang object, if it has one, and ``filled_nodes`` are the nodes
    that have the model, if it is in a node-local cache.

    Raises InvalidResource when ``spec.podTemplate`` is not a valid partial pod.
    """
    template = resource.spec.pod_template
    base = {**_spec(resource, identity, settings), **gang_spec(resource, identity, gang)}
    base["affinity"] = {**base["affinity"], **on_nodes(filled_nodes)}
    for path in template.remove:
        base = without(base, path) or base
    spec = merged(base, template.spec, "spec.podTemplate.spec")
    metadata = child_metadata(resource, names.pod_name(resource.name, identity.group, identity.attempt, identity.index))
    together = {**queue_labels(resource, identity), **gang_labels(resource, identity, gang)}
    labels = {**template.metadata.labels, **metadata["labels"], **_identity_labels(identity), **together}
    annotations = {**template.metadata.annotations, **queue_annotations(resource)}
    annotations |= gang_annotations(resource, identity, gang)
    annotations |= {names.RESTARTS_ANNOTATION: str(identity.restarts), names.EPOCH_ANNOTATION: str(identity.epoch)}
    if resource.spec.model.cache is not None:
        annotations[names.CACHED_SOURCE_ANNOTATION] = names.cached_source(resource)
    if resource.spec.image is None:
        annotations[names.DEFAULT_IMAGE_ANNOTATION] = image_of(resource, settings)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**metadata, "labels": labels, "annotations": annotations},
        # The plan requires that the kubelet never restarts a pod and that the host name is the pod's.
        "spec": {**spec, **_fixed(resource, metadata["name"])},
    }


def check_removals(resource: MegatronInference, settings: Settings) -> None:
    """Raises InvalidResource when no pod has a field that ``spec.podTemplate.remove`` names."""
    identities = [PodIdentity(0, 0, index, True, "", 0) for index in {0, resource.spec.pods_per_group - 1}]
    specs = [_spec(resource, identity, settings) for identity in identities]
    for position, path in enumerate(resource.spec.pod_template.remove):
        if all(without(spec, path) is None for spec in specs):
            fix = "the pods have no such field; correct the path, or leave it out"
            raise InvalidResource.of(f"spec.podTemplate.remove[{position}]", path, fix)


def _identity_labels(identity: PodIdentity) -> dict[str, str]:
    return {
        names.GROUP_LABEL: str(identity.group),
        names.ATTEMPT_LABEL: str(identity.attempt),
        names.INDEX_LABEL: str(identity.index),
        names.ROLE_LABEL: names.LEADER if identity.leader else names.WORKER,
        names.TEMPLATE_HASH_LABEL: identity.template_hash,
    }


def _fixed(resource: MegatronInference, name: str) -> dict[str, Any]:
    return {
        "restartPolicy": "Never",
        "hostname": name,
        "subdomain": names.pods_service(resource.name),
        "terminationGracePeriodSeconds": grace_seconds(resource),
    }


def _spec(resource: MegatronInference, identity: PodIdentity, settings: Settings) -> dict[str, Any]:
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": unprivileged(),
        "volumes": _volumes(resource),
        "containers": [_container(resource, identity, settings)],
        **pod_claims(resource),
        **_runtime(resource),
        **placement(resource, identity),
    }


def _runtime(resource: MegatronInference) -> dict[str, Any]:
    pods = resource.spec.pods
    runtime_class = {"runtimeClassName": pods.runtime_class_name} if pods.runtime_class_name is not None else {}
    # Without this DNS policy, a pod in the node's network does not find the names of other pods.
    network = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if pods.host_network else {}
    return {**runtime_class, **network}


def _container(resource: MegatronInference, identity: PodIdentity, settings: Settings) -> dict[str, Any]:
    left = max(0, resource.spec.failure_policy.max_restarts - identity.restarts)
    return {
        "name": names.CONTAINER,
        "image": image_of(resource, settings),
        "imagePullPolicy": resource.spec.image_pull_policy.value,
        "command": [PROGRAM],
        "args": arguments(resource, max_restarts=left),
        "env": environment(resource, identity),
        "ports": _ports(identity),
        "resources": container_resources(resource, identity.index),
        "volumeMounts": _mounts(resource),
        **confined_container(),
        **_probes(),
    }


def _ports(identity: PodIdentity) -> list[dict[str, Any]]:
    ports = {"control": names.CONTROL_PORT, "metrics": names.METRICS_PORT}
    if identity.index == 0:
        ports |= {"http": names.HTTP_PORT, "coordinator": names.COORDINATOR_PORT, "rendezvous": names.RENDEZVOUS_PORT}
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()]


def _volumes(resource: MegatronInference) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "cache", "emptyDir": {}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    claim, image = resource.spec.model.source.persistent_volume_claim, resource.spec.model.source.image
    if claim is not None:
        source = {"claimName": claim.claim_name, "readOnly": True}
        volumes.append({"name": "model", "persistentVolumeClaim": source})
    if image is not None:
        pulled = {"reference": image.reference, "pullPolicy": image.pull_policy.value}
        volumes.append({"name": "model", "image": pulled})
    if (cached := cached_volume(resource)) is not None:
        volumes.append(cached)
    keys = resource.spec.frontend.api_keys_secret
    if keys is not None:
        items = [{"key": keys.key, "path": API_KEYS_FILE}]
        volumes.append({"name": "api-keys", "secret": {"secretName": keys.name, "items": items}})
    return volumes


def _mounts(resource: MegatronInference) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "cache", "mountPath": CACHE_MOUNT},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    if resource.spec.model.source.volume_path is not None:
        mounts.append({"name": "model", "mountPath": MODEL_MOUNT, "readOnly": True})
    if (cached := cached_mount(resource)) is not None:
        mounts.append(cached)
    if resource.spec.frontend.api_keys_secret is not None:
        mounts.append({"name": "api-keys", "mountPath": API_KEYS_MOUNT, "readOnly": True})
    return mounts


def _probes() -> dict[str, Any]:
    alive = {"httpGet": {"path": "/healthz", "port": "control"}, "timeoutSeconds": 5}
    # A hanging pod gets no new requests after 6 seconds. A false alarm costs little, so this probe is much less patient
    # than the liveness probe.
    ready = {"httpGet": {"path": "/readyz", "port": "control"}, "timeoutSeconds": 2}
    return {
        # Generous: the control API answers only after the libraries were imported, perhaps from a cold disk.
        "startupProbe": {**alive, "periodSeconds": 2, "failureThreshold": 150},
        "livenessProbe": {**alive, "periodSeconds": 10, "failureThreshold": 6},
        "readinessProbe": {**ready, "periodSeconds": 2, "failureThreshold": 2},
    }
