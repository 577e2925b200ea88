"""CRDs of gang scheduling, with the fields that the operator uses."""

from typing import Any

from cluster_support.cluster import Cluster

from megatron_operator import names

Json = dict[str, Any]
COUNT: Json = {"type": "integer", "minimum": 1}
TEXT: Json = {"type": "string"}


def _object(**properties: Json) -> Json:
    return {"type": "object", "properties": properties}


POLICY = _object(gang=_object(minCount=COUNT))
SPECS = {
    names.POD_GROUP: _object(schedulingPolicy=POLICY),
    names.WORKLOAD: _object(podGroups={"type": "array", "items": _object(name=TEXT, policy=POLICY)}),
    names.SCHEDULER_PLUGINS_POD_GROUP: _object(minMember=COUNT),
    names.VOLCANO_POD_GROUP: _object(minMember=COUNT, priorityClassName=TEXT),
}


def plural(kind: str) -> str:
    """The name of the kind for kubectl, with its API group."""
    name, _, group = kind.partition(".")
    return f"{name.lower()}s.{group}"


def definition(kind: str) -> Json:
    """The CRD of one of ``names.GANG_KINDS``."""
    group, _, version = names.GANG_KINDS[kind].partition("/")
    name = kind.partition(".")[0]
    schema = {"openAPIV3Schema": _object(spec=SPECS[kind])}
    plurals = {"plural": f"{name.lower()}s", "singular": name.lower(), "listKind": f"{name}List"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        # The API server requires an approval annotation for CRDs in groups of Kubernetes.
        "metadata": {"name": plural(kind), "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"}},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": name, **plurals},
            "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
        },
    }


def install(cluster: Cluster, kind: str) -> None:
    cluster.define(definition(kind))


def remove(cluster: Cluster, kind: str) -> None:
    """Removes the CRD with all its objects."""
    cluster.kubectl("delete", "crd", plural(kind), "--ignore-not-found", "--timeout=30s")
