"""The headless Service behind the coordinator's address."""

from __future__ import annotations

from typing import Any

from megatron_operator import names
from megatron_operator.api.v1alpha1 import MegatronInference
from megatron_operator.render.metadata import child_metadata


def coordinator_service(resource: MegatronInference) -> dict[str, Any]:
    """Publishes addresses that are not ready too: engines register while the leader is still starting."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(resource, names.coordinator_service(resource.name)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": names.leader_labels(resource.name),
            "ports": [
                {
                    "name": "coordinator",
                    "port": names.COORDINATOR_PORT,
                    "targetPort": "coordinator",
                    "protocol": "TCP",
                },
            ],
        },
    }
