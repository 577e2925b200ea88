"""The model cache: its claim, the Jobs that fill it, and its volume in the pods of the model.

The folder of a source is ``<namespace>/<hash of the source>`` on the volume or below the node's path. It appears when
it is complete, and the volume of a pod is that folder alone.
"""

from __future__ import annotations

from typing import Any

from megatron_operator import names
from megatron_operator.api.v1alpha1 import MegatronInference
from megatron_operator.render.command import (
    CACHE_MOUNT,
    CACHED_MODEL_MOUNT,
    PROGRAM,
    control_environment,
    hub_token,
)
from megatron_operator.render.confinement import confined_container, unprivileged
from megatron_operator.render.merge import merged
from megatron_operator.render.metadata import child_metadata, with_applied_hash
from megatron_operator.render.placement import on_nodes

VOLUME = "model-cache"
DOWNLOADS_MOUNT = "/model-cache"
"""Where a download Job has the root of the cache."""
RETRIES = 3
"""Retries of a Job, with the Job controller's back-off from 10 s on."""
REQUESTS = {"cpu": "500m", "memory": "512Mi"}
TEMPLATE_FIELDS = ("imagePullSecrets", "serviceAccountName", "hostAliases", "dnsPolicy", "dnsConfig")
"""Fields of ``spec.podTemplate.spec`` that hold for downloads too; of its main container, the variables do."""

Json = dict[str, Any]


def cache_folder(resource: MegatronInference) -> str:
    """Path of the folder of the resource's source, relative to the root of the cache."""
    return f"{resource.namespace}/{names.cached_source(resource)}"


def cache_claim(resource: MegatronInference) -> Json | None:
    """The claim for the cache, with its hash annotation; None if the resource does not ask for one."""
    cache = resource.spec.model.cache
    if cache is None or cache.volume_claim is None:
        return None
    claim = cache.volume_claim
    storage = {} if claim.storage_class_name is None else {"storageClassName": claim.storage_class_name}
    manifest = {
        "apiVersion": "v1",
        "kind": names.CLAIM,
        "metadata": child_metadata(resource, names.cache_claim(resource)),
        "spec": {
            "accessModes": [mode.value for mode in claim.access_modes],
            "resources": {"requests": {"storage": claim.size.text}},
            **storage,
        },
    }
    return with_applied_hash(manifest)


def cached_volume(resource: MegatronInference) -> Json | None:
    """The volume of the pods; None without a cache. On a node, only a folder that is complete can be mounted."""
    cache = resource.spec.model.cache
    if cache is None:
        return None
    if cache.host_path is not None:
        path = f"{cache.host_path.path.rstrip('/')}/{cache_folder(resource)}"
        return {"name": VOLUME, "hostPath": {"path": path, "type": "Directory"}}
    return {"name": VOLUME, "persistentVolumeClaim": {"claimName": _claim_name(resource), "readOnly": True}}


def cached_mount(resource: MegatronInference) -> Json | None:
    """The mount of the pods; None without a cache."""
    cache = resource.spec.model.cache
    if cache is None:
        return None
    below = {} if cache.host_path is not None else {"subPath": cache_folder(resource)}
    return {"name": VOLUME, "mountPath": CACHED_MODEL_MOUNT, "readOnly": True, **below}


def download_job(resource: MegatronInference, image: str, node: str | None) -> Json:
    """The Job that fills the cache of the node, or of the claim, with its hash annotation.

    That of a shared cache has no owner: it is the record that the model is there when the resource is gone.
    """
    cache = resource.spec.model.cache
    metadata = child_metadata(resource, names.download_job(resource, node))
    annotations = {names.CACHED_SOURCE_ANNOTATION: names.cached_source(resource)}
    if cache is not None and cache.is_shared:
        (owner,) = metadata.pop("ownerReferences")
        annotations[names.OWNER_ANNOTATION] = owner["uid"]
    if node is not None:
        annotations[names.CACHE_NODE_ANNOTATION] = node
    metadata["annotations"] = annotations
    manifest: Json = {
        "apiVersion": "batch/v1",
        "kind": names.JOB,
        "metadata": metadata,
        "spec": {
            "backoffLimit": RETRIES,
            "template": {
                "metadata": {
                    "labels": {names.CACHE_LABEL: resource.name, "app.kubernetes.io/managed-by": names.MANAGER}
                },
                "spec": _pod_spec(resource, image, node),
            },
        },
    }
    return with_applied_hash(manifest)


def _pod_spec(resource: MegatronInference, image: str, node: str | None) -> Json:
    scheduling, template = resource.spec.scheduling, resource.spec.pod_template.spec
    base: Json = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _security(node),
        "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "cache", "emptyDir": {}}, _root_volume(resource)],
        "containers": [_container(resource, image)],
    }
    if node is not None:
        base["affinity"] = on_nodes([node])
    elif scheduling.node_selector:
        base["nodeSelector"] = dict(scheduling.node_selector)
    if scheduling.tolerations:
        base["tolerations"] = [
            each.model_dump(mode="json", by_alias=True, exclude_none=True) for each in scheduling.tolerations
        ]
    override = {field: template[field] for field in TEMPLATE_FIELDS if field in template}
    main: Json = next((each for each in template.get("containers") or [] if each.get("name") == names.CONTAINER), {})
    variables = {field: main[field] for field in ("env", "envFrom") if field in main}
    override["containers"] = [{"name": names.CONTAINER, **variables}]
    return merged(base, override, "spec.podTemplate.spec")


def _container(resource: MegatronInference, image: str) -> Json:
    into = f"--into={DOWNLOADS_MOUNT}/{cache_folder(resource)}"
    return {
        "name": names.CONTAINER,
        "image": image,
        "imagePullPolicy": resource.spec.image_pull_policy.value,
        "command": [PROGRAM],
        "args": ["model", "fetch", *_source(resource), into],
        "env": [*control_environment(resource), *hub_token(resource)],
        **_credentials(resource),
        "ports": [{"name": "control", "containerPort": names.CONTROL_PORT, "protocol": "TCP"}],
        "resources": {"requests": dict(REQUESTS)},
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "cache", "mountPath": CACHE_MOUNT},
            {"name": VOLUME, "mountPath": DOWNLOADS_MOUNT},
        ],
        **confined_container(),
    }


def _source(resource: MegatronInference) -> list[str]:
    source = resource.spec.model.source
    if source.object_storage is not None:
        return [source.object_storage.uri]
    hub = source.hugging_face
    assert hub is not None  # only downloaded models have a cache
    file = [] if hub.file is None else [f"--file={hub.file}"]
    return [hub.repo, *file, f"--revision={hub.revision}"]


def _credentials(resource: MegatronInference) -> Json:
    """The variables from the Secret for object storage."""
    objects = resource.spec.model.source.object_storage
    if objects is None or objects.credentials_secret is None:
        return {}
    return {"envFrom": [{"secretRef": {"name": objects.credentials_secret}}]}


def _security(node: str | None) -> Json:
    """A folder of a node belongs to root, and Kubernetes changes the owner of no folder of a node."""
    of_user = unprivileged()
    if node is None:
        return of_user
    return {"runAsUser": 0, "runAsGroup": 0, "seccompProfile": of_user["seccompProfile"]}


def _root_volume(resource: MegatronInference) -> Json:
    cache = resource.spec.model.cache
    if cache is not None and cache.host_path is not None:
        return {"name": VOLUME, "hostPath": {"path": cache.host_path.path, "type": "DirectoryOrCreate"}}
    return {"name": VOLUME, "persistentVolumeClaim": {"claimName": _claim_name(resource)}}


def _claim_name(resource: MegatronInference) -> str:
    cache = resource.spec.model.cache
    return names.cache_claim(resource) if cache is None or cache.claim_name is None else cache.claim_name
