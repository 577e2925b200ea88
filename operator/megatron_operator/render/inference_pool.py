"""The InferencePool by which gateways with an endpoint picker choose the pod for a request."""

from __future__ import annotations

from typing import Any

from megatron_operator import names
from megatron_operator.api.v1alpha1 import MegatronInference
from megatron_operator.render.metadata import child_metadata

GROUP = "inference.networking.k8s.io"


def inference_pool(resource: MegatronInference) -> dict[str, Any] | None:
    """An InferencePool named like the resource; None unless the spec has one."""
    exposure = resource.spec.expose.inference_pool
    if exposure is None:
        return None
    picker = exposure.endpoint_picker
    metadata = child_metadata(resource, names.route(resource.name))
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": "InferencePool",
        "metadata": {**metadata, "annotations": dict(exposure.annotations)},
        "spec": {
            "selector": {"matchLabels": names.frontend_labels(resource.name)},
            "targetPorts": [{"number": names.HTTP_PORT}],
            "endpointPickerRef": {
                "name": picker.name,
                "port": {"number": picker.port},
                "failureMode": picker.failure_mode.value,
            },
        },
    }


def pool_backend(resource: MegatronInference) -> dict[str, str] | None:
    """The InferencePool as the backend of an HTTPRoute; None unless the spec has one."""
    if resource.spec.expose.inference_pool is None:
        return None
    return {"group": GROUP, "kind": "InferencePool", "name": names.route(resource.name)}
