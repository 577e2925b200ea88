"""The headless Service behind the pods' host names, by which the pods of a group find each other."""

from __future__ import annotations

from typing import Any

from megatron_operator import names
from megatron_operator.api.v1alpha1 import MegatronInference
from megatron_operator.render.metadata import child_metadata


def pods_service(resource: MegatronInference) -> dict[str, Any]:
    """Publishes addresses that are not ready too: ranks meet before any of them is."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(resource, names.pods_service(resource.name)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.NAME_LABEL: resource.name},
            "ports": [
                {
                    "name": "rendezvous",
                    "port": names.RENDEZVOUS_PORT,
                    "targetPort": "rendezvous",
                    "protocol": "TCP",
                },
            ],
        },
    }
