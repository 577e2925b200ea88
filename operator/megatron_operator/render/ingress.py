"""The Ingress that connects external clients to the HTTP Service."""

from __future__ import annotations

from typing import Any

from megatron_operator import names
from megatron_operator.api.v1alpha1 import IngressExposure, MegatronInference
from megatron_operator.render.metadata import child_metadata


def ingress(resource: MegatronInference) -> dict[str, Any] | None:
    """An Ingress named like the resource; None unless the spec has one."""
    exposure = resource.spec.expose.ingress
    if exposure is None:
        return None
    metadata = child_metadata(resource, names.route(resource.name))
    spec: dict[str, Any] = {"rules": [_rule(resource, exposure)]}
    if exposure.class_name is not None:
        spec["ingressClassName"] = exposure.class_name
    if exposure.tls_secret is not None:
        hosts = {} if exposure.host is None else {"hosts": [exposure.host]}
        spec["tls"] = [{**hosts, "secretName": exposure.tls_secret}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "Ingress",
        "metadata": {**metadata, "annotations": dict(exposure.annotations)},
        "spec": spec,
    }


def _rule(resource: MegatronInference, exposure: IngressExposure) -> dict[str, Any]:
    service = {"name": names.http_service(resource.name), "port": {"number": names.HTTP_PORT}}
    path = {"path": exposure.path, "pathType": "Prefix", "backend": {"service": service}}
    host = {} if exposure.host is None else {"host": exposure.host}
    return {**host, "http": {"paths": [path]}}
