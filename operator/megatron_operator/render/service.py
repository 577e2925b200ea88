"""The common part of all Services of a resource."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_operator.api.v1alpha1 import MegatronInference
from megatron_operator.render.metadata import child_metadata

HEADLESS = {"clusterIP": "None", "publishNotReadyAddresses": True}
"""Spec of a Service that only provides DNS names, for unready pods too."""


def service(
    resource: MegatronInference,
    name: str,
    kind: Mapping[str, Any],
    *,
    selector: Mapping[str, str],
    port_name: str,
    port: int,
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A Service with one TCP port for the container port of the same name; ``kind`` is the rest of its spec."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(resource, name) | ({"annotations": dict(annotations)} if annotations else {}),
        "spec": {
            **kind,
            "selector": dict(selector),
            "ports": [{"name": port_name, "port": port, "targetPort": port_name, "protocol": "TCP"}],
        },
    }
