"""The rights that the roles of operator and activator have to grant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_operator.api.v1alpha1 import GROUP, PLURAL
from megatron_operator.kubernetes.lease import LeaseName

Rules = Sequence[tuple[str, str, Sequence[str]]]


@dataclass(frozen=True)
class Right:
    """One verb on one resource; ``resource`` may include a subresource after a slash.

    An empty ``namespace`` means the whole cluster, an empty ``name`` all objects.
    """

    group: str
    resource: str
    verb: str
    namespace: str = ""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource} {self.name}".rstrip()


GANG_GROUPS = ("scheduling.x-k8s.io", "scheduling.volcano.sh", "scheduling.k8s.io")
GANG_VERBS = ("get", "list", "create", "patch", "delete")

RULES = (
    (GROUP, PLURAL, ("get", "list", "watch")),
    (GROUP, f"{PLURAL}/status", ("patch",)),
    (GROUP, f"{PLURAL}/finalizers", ("update",)),
    ("", "pods", ("get", "list", "watch", "create", "patch", "delete")),
    ("", "services", ("get", "list", "watch", "create", "patch")),
    ("", "secrets", ("get", "create")),
    ("networking.k8s.io", "networkpolicies", ("get", "list", "watch", "create", "patch", "delete")),
    ("networking.k8s.io", "ingresses", ("get", "list", "watch", "create", "patch", "delete")),
    ("policy", "poddisruptionbudgets", ("get", "create", "patch", "delete")),
    ("batch", "jobs", ("get", "list", "create", "delete")),
    ("", "persistentvolumeclaims", ("get", "list", "create", "patch", "delete")),
    ("gateway.networking.k8s.io", "httproutes", ("get", "list", "watch", "create", "patch", "delete")),
    ("inference.networking.k8s.io", "inferencepools", ("get", "list", "watch", "create", "patch", "delete")),
    *((group, "podgroups", GANG_VERBS) for group in GANG_GROUPS),
    ("scheduling.k8s.io", "workloads", GANG_VERBS),
    ("kueue.x-k8s.io", "workloads", ("delete",)),
    ("events.k8s.io", "events", ("create",)),
)
"""Rights in each watched namespace."""

LEASE_RULES = (("coordination.k8s.io", "leases", ("create", "get", "update")),)
"""Rights in the namespace of the Lease for leader election. The operator uses no other Lease."""

CLUSTER_RULES = (
    ("apiextensions.k8s.io", "customresourcedefinitions", ("list", "watch")),
    ("", "nodes", ("list", "watch")),
)
"""Additional rights of an operator that watches all namespaces."""

ACTIVATOR_RULES = (
    (GROUP, PLURAL, ("get", "list")),
    (GROUP, f"{PLURAL}/status", ("patch",)),
)
"""Rights of an activator in each namespace that it serves."""

BY_NAME = ("secrets", "get")
"""The operator reads only the keys Secrets of its resources, so a role may list their names."""


def needed(namespace: str, *, everywhere: bool, lease: LeaseName | None, keys: Sequence[str]) -> Iterator[Right]:
    """Each right that an operator needs to watch this namespace, or all.

    Args:
        lease: The Lease for leader election; None without one.
        keys: Names of the keys Secrets of the resources in the namespace.
    """
    for right in _rights(RULES, namespace):
        named = (right.resource, right.verb) == BY_NAME and keys
        yield from (replace(right, name=key) for key in keys) if named else (right,)
    if lease is not None:
        for right in _rights(LEASE_RULES, lease.namespace):
            # A role cannot restrict ``create`` by name.
            yield right if right.verb == "create" else replace(right, name=lease.name)
    if everywhere:
        yield from _rights(CLUSTER_RULES, "")


def needed_by_activator(namespace: str, key_secrets: Sequence[str]) -> Iterator[Right]:
    """Each right that an activator needs in this namespace, with the Secrets of API keys that it has to read."""
    yield from _rights(ACTIVATOR_RULES, namespace)
    yield from (Right("", "secrets", "get", namespace, name) for name in key_secrets)


def _rights(rules: Rules, namespace: str) -> Iterator[Right]:
    for group, resource, verbs in rules:
        yield from (Right(group, resource, verb, namespace) for verb in verbs)
