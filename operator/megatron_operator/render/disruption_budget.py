"""The PodDisruptionBudget, which delays evictions while they would make too many replica groups unavailable."""

from __future__ import annotations

from typing import Any

from megatron_operator import names
from megatron_operator.api.v1alpha1 import MegatronInference
from megatron_operator.render.metadata import child_metadata, with_applied_hash


def disruption_budget(resource: MegatronInference, kind: str, default_unavailable: int) -> dict[str, Any]:
    """A budget over all pods, with its hash annotation. ``kind`` is one of ``names.BUDGET_KINDS``.

    A replica group ends with any of its pods, so the budget permits the eviction of ``maxUnavailable`` pods, each of
    which may be in another group. The number is absolute: percentages and ``maxUnavailable`` of a
    PodDisruptionBudget refer to the scale subresource, which counts replica groups.
    """
    unavailable = resource.spec.disruption.max_unavailable
    pods = resource.spec.replicas * resource.spec.pods_per_group
    least = pods - (default_unavailable if unavailable is None else unavailable)
    manifest = {
        "apiVersion": names.BUDGET_KINDS[kind],
        "kind": names.BUDGET,
        "metadata": child_metadata(resource, names.disruption_budget(resource.name)),
        "spec": {"minAvailable": max(0, least), "selector": {"matchLabels": {names.NAME_LABEL: resource.name}}},
    }
    return with_applied_hash(manifest)
