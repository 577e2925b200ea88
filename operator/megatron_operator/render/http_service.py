"""The Service that users talk to: the leader's HTTP port, once it is ready."""

from __future__ import annotations

from typing import Any

from megatron_operator import names
from megatron_operator.api.v1alpha1 import MegatronInference
from megatron_operator.render.metadata import child_metadata


def http_service(resource: MegatronInference) -> dict[str, Any]:
    """A Service named like the resource."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(resource, names.http_service(resource.name)),
        "spec": {
            "type": resource.spec.expose.service.type.value,
            "selector": names.leader_labels(resource.name),
            "ports": [{"name": "http", "port": names.HTTP_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }
