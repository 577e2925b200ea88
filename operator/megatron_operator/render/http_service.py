"""The Service for clients: the HTTP port of every replica group's first pod, while it is ready."""

from __future__ import annotations

from typing import Any

from megatron_operator import names
from megatron_operator.api.v1alpha1 import MegatronInference
from megatron_operator.render.service import service


def http_service(resource: MegatronInference) -> dict[str, Any]:
    """A Service named like the resource."""
    return service(
        resource,
        names.http_service(resource.name),
        {"type": resource.spec.expose.service.type.value},
        selector=names.frontend_labels(resource.name),
        port_name="http",
        port=names.HTTP_PORT,
        annotations=resource.spec.expose.service.annotations,
    )
