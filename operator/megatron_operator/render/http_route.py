"""The HTTPRoute that connects external clients to the HTTP Service, or the InferencePool, through a Gateway."""

from __future__ import annotations

from typing import Any

from megatron_operator import names
from megatron_operator.api.v1alpha1 import HTTPRouteExposure, MegatronInference
from megatron_operator.render.inference_pool import pool_backend
from megatron_operator.render.metadata import child_metadata

UNITS = (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1))
"""Units of a duration in the Gateway API, in milliseconds."""


def http_route(resource: MegatronInference) -> dict[str, Any] | None:
    """An HTTPRoute named like the resource; None unless the spec has one."""
    exposure = resource.spec.expose.http_route
    if exposure is None:
        return None
    metadata = child_metadata(resource, names.route(resource.name))
    parents = [parent.model_dump(by_alias=True, exclude_none=True) for parent in exposure.parent_refs]
    spec: dict[str, Any] = {"parentRefs": parents, "rules": [_rule(resource, exposure)]}
    if exposure.hostnames:
        spec["hostnames"] = list(exposure.hostnames)
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {**metadata, "annotations": dict(exposure.annotations)},
        "spec": spec,
    }


def gateway_duration(seconds: float) -> str:
    """A duration in the format of the Gateway API: hours, minutes, seconds and milliseconds (GEP-2257)."""
    left = round(seconds * 1000)
    parts = []
    for unit, milliseconds in UNITS:
        count, left = divmod(left, milliseconds)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def _rule(resource: MegatronInference, exposure: HTTPRouteExposure) -> dict[str, Any]:
    service = {"name": names.http_service(resource.name), "port": names.HTTP_PORT}
    return {
        "matches": [{"path": {"type": "PathPrefix", "value": exposure.path}}],
        # Always set: the default timeout of many gateways would cut off long answers.
        "timeouts": {"request": gateway_duration(exposure.request_timeout)},
        "backendRefs": [pool_backend(resource) or service],
    }
