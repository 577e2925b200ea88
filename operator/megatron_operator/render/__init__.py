"""Pure functions that render the children, one file per kind."""

from __future__ import annotations

from typing import Any

from megatron_operator.api.v1alpha1 import MegatronInference
from megatron_operator.render.coordinator_service import coordinator_service
from megatron_operator.render.disruption_budget import disruption_budget
from megatron_operator.render.gang import gang_kind, gang_object
from megatron_operator.render.http_route import http_route
from megatron_operator.render.http_service import http_service
from megatron_operator.render.inference_pool import inference_pool
from megatron_operator.render.ingress import ingress
from megatron_operator.render.keys_secret import keys_secret
from megatron_operator.render.metadata import owner_reference, with_applied_hash
from megatron_operator.render.model_cache import cache_claim, download_job
from megatron_operator.render.network_policy import network_policy
from megatron_operator.render.pod import check_removals, grace_seconds, image_of, render_pod
from megatron_operator.render.pods_service import pods_service
from megatron_operator.render.resources import pod_claims
from megatron_operator.settings import Settings

__all__ = [
    "cache_claim",
    "check_removals",
    "disruption_budget",
    "download_job",
    "gang_kind",
    "gang_object",
    "grace_seconds",
    "image_of",
    "keys_secret",
    "owner_reference",
    "pod_claims",
    "render_children",
    "render_pod",
]


def render_children(resource: MegatronInference, settings: Settings) -> list[dict[str, Any]]:
    """All children except pods, their gang objects, the Secret and the budget, each with its hash annotation."""
    services = (coordinator_service(resource), pods_service(resource), http_service(resource))
    routes = (ingress(resource), http_route(resource), inference_pool(resource))
    desired = (network_policy(resource, settings), *services, *routes)
    return [with_applied_hash(manifest) for manifest in desired if manifest is not None]
