"""CPU, memory and devices of a pod's container."""

from __future__ import annotations

from typing import Any

from megatron_operator import names
from megatron_operator.api.v1alpha1 import Device, GpuAllocation, MegatronInference

MEBIBYTE = 1 << 20
CPU_RANK = {"cpu": 500, "memory": 1024}
"""Requests of a rank on CPUs besides its KV cache, in millicores and MiB."""
CUDA_RANK = {"cpu": 1000, "memory": 2048}
"""Requests of a rank on a GPU, in millicores and MiB."""


def container_resources(resource: MegatronInference, pod_index: int) -> dict[str, Any]:
    """``resources`` of the main container of a replica group's pod.

    A default request gives way to a request or limit of the same resource in ``spec.pods.resources`` or
    ``spec.podTemplate``, because it could exceed that limit.
    """
    pods = resource.spec.pods
    limits = {name: amount.text for name, amount in pods.resources.limits.items()}
    requests = {name: amount.text for name, amount in pods.resources.requests.items() if amount}
    if pods.device is Device.CUDA and pods.gpu_allocation is GpuAllocation.DEVICE_PLUGIN:
        limits[pods.gpu_resource] = str(resource.spec.ranks_in_pod(pod_index))
    chosen = {*pods.resources.requests, *limits, *_chosen_by_template(resource.spec.pod_template.spec)}
    defaults = {name: text for name, text in _defaults(resource, pod_index).items() if name not in chosen}
    claims = {"claims": _claims(resource)} if pods.resource_claims else {}
    amounts = {"requests": defaults | requests, "limits": limits}
    return {**{kind: each for kind, each in amounts.items() if each}, **claims}


def pod_claims(resource: MegatronInference) -> dict[str, Any]:
    """The part of a pod's spec with its resource claims; empty without some."""
    claims = resource.spec.pods.resource_claims
    listed = [claim.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"requests"}) for claim in claims]
    return {"resourceClaims": listed} if listed else {}


def _claims(resource: MegatronInference) -> list[dict[str, str]]:
    """The claims of the main container: each request of a claim that is named, or else the whole claim."""
    return [
        {"name": claim.name, **request}
        for claim in resource.spec.pods.resource_claims
        for request in [{"request": name} for name in claim.requests] or [{}]
    ]


def _defaults(resource: MegatronInference, pod_index: int) -> dict[str, str]:
    ranks = resource.spec.ranks_in_pod(pod_index)
    cache = -(-(resource.spec.kv_cache_memory or 0) // MEBIBYTE)
    on_cpu = resource.spec.pods.device is Device.CPU
    rank = CPU_RANK if on_cpu else CUDA_RANK
    memory = rank["memory"] + (cache if on_cpu else 0)
    return {"cpu": f"{ranks * rank['cpu']}m", "memory": f"{ranks * memory}Mi"}


def _chosen_by_template(spec: dict[str, Any]) -> set[str]:
    """Names of the resources in ``spec.podTemplate``, of the container or of the whole pod."""
    containers = [each for each in spec.get("containers") or [] if isinstance(each, dict)]
    holders = [spec, *(each for each in containers if each.get("name") == names.CONTAINER)]
    found = [each["resources"] for each in holders if isinstance(each.get("resources"), dict)]
    return {name for each in found for kind in ("requests", "limits") for name in each.get(kind) or {}}
