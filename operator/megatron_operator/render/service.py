"""What all Services of a resource have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_operator.api.v1alpha1 import MegatronInference
from megatron_operator.render.metadata import child_metadata

HEADLESS = {"clusterIP": "None", "publishNotReadyAddresses": True}
"""Of a Service that is only a name for its pods, those that are not ready too."""


def service(
    resource: MegatronInference,
    name: str,
    kind: Mapping[str, Any],
    *,
    selector: Mapping[str, str],
    port_name: str,
    port: int,
) -> dict[str, Any]:
    """A Service with one TCP port, which leads to the containers' port of the same name; ``kind`` is spec's rest."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(resource, name),
        "spec": {
            **kind,
            "selector": dict(selector),
            "ports": [{"name": port_name, "port": port, "targetPort": port_name, "protocol": "TCP"}],
        },
    }
