"""What the operator does at the API server: the rights that its role has to grant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_operator.api.v1alpha1 import GROUP, PLURAL
from megatron_operator.kubernetes.lease import LeaseName

Rules = Sequence[tuple[str, str, Sequence[str]]]


@dataclass(frozen=True)
class Right:
    """One verb on one resource; ``resource`` may have a subresource behind a slash.

    Without a ``namespace`` it is one on the whole cluster; without a ``name``, on all objects.
    """

    group: str
    resource: str
    verb: str
    namespace: str = ""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource} {self.name}".rstrip()


RULES = (
    (GROUP, PLURAL, ("get", "list", "watch")),
    (GROUP, f"{PLURAL}/status", ("patch",)),
    (GROUP, f"{PLURAL}/finalizers", ("update",)),
    ("", "pods", ("get", "list", "watch", "create", "patch", "delete")),
    ("", "services", ("get", "list", "watch", "create", "patch")),
    ("", "secrets", ("get", "create")),
    ("networking.k8s.io", "networkpolicies", ("get", "list", "watch", "create", "patch", "delete")),
    ("networking.k8s.io", "ingresses", ("get", "list", "watch", "create", "patch", "delete")),
    ("gateway.networking.k8s.io", "httproutes", ("get", "list", "watch", "create", "patch", "delete")),
    ("events.k8s.io", "events", ("create",)),
)
"""In each namespace that it looks after."""

LEASE_RULES = (("coordination.k8s.io", "leases", ("create", "get", "update")),)
"""In the namespace of the Lease by which one of several operators acts; no other Lease is read or changed."""

CLUSTER_RULES = (("apiextensions.k8s.io", "customresourcedefinitions", ("list", "watch")),)
"""Beyond these, of an operator that looks after all namespaces."""

BY_NAME = ("secrets", "get")
"""The operator reads no Secret but those with the keys of its resources, so that a role may name them."""


def needed(namespace: str, *, everywhere: bool, lease: LeaseName | None, keys: Sequence[str]) -> Iterator[Right]:
    """Each right of an operator that looks after this namespace, or after all.

    Args:
        lease: The one that it holds while it acts; None when it does without.
        keys: The names of the Secrets with keys that its resources in the namespace have, or will have.
    """
    for right in _rights(RULES, namespace):
        named = (right.resource, right.verb) == BY_NAME and keys
        yield from (replace(right, name=key) for key in keys) if named else (right,)
    if lease is not None:
        for right in _rights(LEASE_RULES, lease.namespace):
            # Nothing that is yet to be made has a name by which a role could allow it.
            yield right if right.verb == "create" else replace(right, name=lease.name)
    if everywhere:
        yield from _rights(CLUSTER_RULES, "")


def _rights(rules: Rules, namespace: str) -> Iterator[Right]:
    for group, resource, verbs in rules:
        yield from (Right(group, resource, verb, namespace) for verb in verbs)
