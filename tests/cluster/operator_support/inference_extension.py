"""The CRD InferencePool of the Gateway API Inference Extension 1.0, with the fields that the operator uses."""

from typing import Any

from cluster_support.cluster import Cluster

Json = dict[str, Any]
NAME = "inferencepools.inference.networking.k8s.io"
TEXT: Json = {"type": "string", "minLength": 1, "maxLength": 253}
PORT: Json = {
    "type": "object",
    "required": ["number"],
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
}
PICKER: Json = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "group": {"type": "string", "default": ""},
        "kind": {**TEXT, "default": "Service"},
        "name": TEXT,
        "port": PORT,
        "failureMode": {"type": "string", "enum": ["FailOpen", "FailClose"], "default": "FailClose"},
    },
    "x-kubernetes-validations": [
        {"rule": "self.kind != 'Service' || has(self.port)", "message": "port is required when kind is 'Service'"}
    ],
}
SPEC: Json = {
    "type": "object",
    "required": ["selector", "targetPorts", "endpointPickerRef"],
    "properties": {
        "selector": {
            "type": "object",
            "required": ["matchLabels"],
            "properties": {"matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}},
        },
        "targetPorts": {
            "type": "array",
            "minItems": 1,
            "maxItems": 8,
            "x-kubernetes-list-type": "atomic",
            "items": PORT,
        },
        "endpointPickerRef": PICKER,
    },
}


def definition() -> Json:
    names = {
        "kind": "InferencePool",
        "listKind": "InferencePoolList",
        "plural": "inferencepools",
        "singular": "inferencepool",
    }
    status = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"type": "object", "required": ["spec"], "properties": {"spec": SPEC, "status": status}}
    version = {"name": "v1", "served": True, "storage": True, "subresources": {"status": {}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        # The API server requires an approval annotation for CRDs in this group.
        "metadata": {"name": NAME, "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"}},
        "spec": {
            "group": "inference.networking.k8s.io",
            "scope": "Namespaced",
            "names": names,
            "versions": [{**version, "schema": {"openAPIV3Schema": schema}}],
        },
    }


def install(cluster: Cluster) -> None:
    cluster.define(definition())


def remove(cluster: Cluster) -> None:
    """Removes the CRD with all pools."""
    cluster.kubectl("delete", "crd", NAME, "--ignore-not-found", "--timeout=30s")
