"""What the operator does at the API server: the rights that its role has to grant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_operator.api.v1alpha1 import GROUP, PLURAL


@dataclass(frozen=True)
class Right:
    """One verb on one resource; ``resource`` may have a subresource behind a slash."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


RULES = (
    (GROUP, PLURAL, ("get", "list", "watch")),
    (GROUP, f"{PLURAL}/status", ("patch",)),
    (GROUP, f"{PLURAL}/finalizers", ("update",)),
    ("", "pods", ("get", "list", "watch", "create", "delete")),
    ("", "services", ("get", "list", "watch", "create", "patch")),
    ("", "secrets", ("get", "create")),
    ("networking.k8s.io", "networkpolicies", ("get", "list", "watch", "create", "patch", "delete")),
    ("events.k8s.io", "events", ("create",)),
)
"""In each namespace that it looks after."""

CLUSTER_RULES = (("apiextensions.k8s.io", "customresourcedefinitions", ("list", "watch")),)
"""Beyond these, of an operator that looks after all namespaces."""


def needed(*, everywhere: bool) -> Iterator[tuple[Right, bool]]:
    """Each right, and whether it is one within the namespace."""
    for rules, inside in ((RULES, True), (CLUSTER_RULES if everywhere else (), False)):
        for group, resource, verbs in rules:
            yield from ((Right(group, resource, verb), inside) for verb in verbs)
