"""Metadata of all children."""

from __future__ import annotations

from typing import Any

from megatron_operator import names
from megatron_operator.api.v1alpha1 import API_VERSION, KIND, MegatronInference
from megatron_operator.observed_state import Manifest


def child_metadata(resource: MegatronInference, name: str) -> dict[str, Any]:
    """Name, namespace, labels, and the ownerReference for garbage collection."""
    return {
        "name": name,
        "namespace": resource.namespace,
        "labels": names.child_labels(resource.name),
        "ownerReferences": [owner_reference(resource)],
    }


def owner_reference(resource: MegatronInference) -> dict[str, Any]:
    """The reference of a child to the resource, by which Kubernetes deletes the child after it."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": resource.name,
        "uid": resource.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def with_applied_hash(manifest: Manifest) -> dict[str, Any]:
    """The manifest with its own hash as an annotation, which shows whether it has to be applied again."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), names.APPLIED_HASH_ANNOTATION: names.hash_of(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}
