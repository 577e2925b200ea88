"""The Ingress by which clients outside the cluster reach the HTTP Service."""

from __future__ import annotations

from typing import Any

from megatron_operator import names
from megatron_operator.api.v1alpha1 import IngressExposure, MegatronInference
from megatron_operator.render.metadata import child_metadata


def ingress(resource: MegatronInference) -> dict[str, Any] | None:
    """An Ingress named like the resource; None where none is wished for."""
    wish = resource.spec.expose.ingress
    if wish is None:
        return None
    metadata = child_metadata(resource, names.route(resource.name))
    spec: dict[str, Any] = {"rules": [_rule(resource, wish)]}
    if wish.class_name is not None:
        spec["ingressClassName"] = wish.class_name
    if wish.tls_secret is not None:
        hosts = {} if wish.host is None else {"hosts": [wish.host]}
        spec["tls"] = [{**hosts, "secretName": wish.tls_secret}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "Ingress",
        "metadata": {**metadata, "annotations": dict(wish.annotations)},
        "spec": spec,
    }


def _rule(resource: MegatronInference, wish: IngressExposure) -> dict[str, Any]:
    service = {"name": names.http_service(resource.name), "port": {"number": names.HTTP_PORT}}
    path = {"path": wish.path, "pathType": "Prefix", "backend": {"service": service}}
    host = {} if wish.host is None else {"host": wish.host}
    return {**host, "http": {"paths": [path]}}
