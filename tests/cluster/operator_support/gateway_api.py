"""The CRD HTTPRoute of the Gateway API, with the fields that the operator uses."""

from typing import Any

from cluster_support.cluster import Cluster

Json = dict[str, Any]
NAME = "httproutes.gateway.networking.k8s.io"
TEXT: Json = {"type": "string"}
PORT: Json = {"type": "integer", "minimum": 1, "maximum": 65535}


def definition(*, timeouts: bool = True) -> Json:
    """The CRD; without ``timeouts`` that of a version before 1.2."""
    names = {"kind": "HTTPRoute", "listKind": "HTTPRouteList", "plural": "httproutes", "singular": "httproute"}
    schema = _object(spec=_spec(timeouts=timeouts), status={**_object(), "x-kubernetes-preserve-unknown-fields": True})
    version = {"name": "v1", "served": True, "storage": True, "subresources": {"status": {}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        # The API server requires an approval annotation for CRDs in this group.
        "metadata": {"name": NAME, "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"}},
        "spec": {
            "group": "gateway.networking.k8s.io",
            "scope": "Namespaced",
            "names": names,
            "versions": [{**version, "schema": {"openAPIV3Schema": schema}}],
        },
    }


def install(cluster: Cluster, *, timeouts: bool = True) -> None:
    cluster.define(definition(timeouts=timeouts))


def remove(cluster: Cluster) -> None:
    """Removes the CRD with all routes."""
    cluster.kubectl("delete", "crd", NAME, "--ignore-not-found", "--timeout=30s")


def _spec(*, timeouts: bool) -> Json:
    parent = _object(
        group={**TEXT, "default": "gateway.networking.k8s.io"},
        kind={**TEXT, "default": "Gateway"},
        name=TEXT,
        namespace=TEXT,
        sectionName=TEXT,
        port=PORT,
    )
    path = _object(type={**TEXT, "enum": ["Exact", "PathPrefix", "RegularExpression"]}, value=TEXT)
    backend = _object(
        group={**TEXT, "default": ""},
        kind={**TEXT, "default": "Service"},
        name=TEXT,
        port=PORT,
        weight={"type": "integer", "default": 1},
    )
    duration = {**TEXT, "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
    rule = _object(matches=_list(_object(path=path)), backendRefs=_list(backend))
    if timeouts:
        rule["properties"]["timeouts"] = _object(request=duration, backendRequest=duration)
    return _object(parentRefs=_list(parent), hostnames=_list(TEXT), rules=_list(rule))


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}
