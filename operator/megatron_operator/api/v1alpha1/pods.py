"""The pods of a replica group: ranks, devices, and what each pod requests of its node."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from megatron_operator.api.quantity import ResourceQuantity
from megatron_operator.api.v1alpha1.base import Boolean, DnsLabel, DnsName, Integer, Part, misplaced

ONE_CLAIM = "exactly one of resourceClaimName and resourceClaimTemplateName must say what is claimed"


class Device(StrEnum):
    """The device of a rank."""

    CPU = "cpu"
    CUDA = "cuda"


class ComputeResources(Part):
    """Resources of each pod's container, by name, such as cpu, memory, ephemeral-storage and rdma/hca."""

    requests: dict[str, ResourceQuantity] = Field(default={})
    """Resources that a pod reserves on its node. Default: for each rank 500m of cpu and the KV cache + 1Gi of
    memory with device cpu, 1 of cpu and 2Gi of memory with device cuda; what podTemplate or limits set takes
    precedence. 0 of cpu or memory: no request."""
    limits: dict[str, ResourceQuantity] = Field(default={})
    """Resources that a pod may use at most, and devices like rdma/hca. Default: none, except GPUs. A limit without a
    request is the request too."""


class GpuAllocation(StrEnum):
    """What allocates the GPUs of a pod."""

    DEVICE_PLUGIN = "DevicePlugin"
    RESOURCE_CLAIMS = "ResourceClaims"


class PodResourceClaim(Part):
    """Devices that each pod claims by dynamic resource allocation (DRA): exactly one of both names."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "has(self.resourceClaimName) != has(self.resourceClaimTemplateName)",
                    "message": f"spec.pods.resourceClaims: {ONE_CLAIM}; set one",
                }
            ]
        }
    )

    name: DnsLabel
    """Name of the claim within the pod, such as gpus."""
    resource_claim_template_name: DnsName | None = None
    """ResourceClaimTemplate from which each pod gets its own ResourceClaim, in the resource's namespace."""
    resource_claim_name: DnsName | None = None
    """ResourceClaim that all pods share, in the resource's namespace."""
    requests: list[DnsLabel] = Field(default=[], max_length=32)
    """Names of requests of the claim that the runtime's container gets. Default: all of them."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        names = (self.resource_claim_name, self.resource_claim_template_name)
        if names.count(None) != 1:
            raise ValueError(
                f"{ONE_CLAIM}, {'neither is set: set one' if names[0] is None else 'not both: remove one'}"
            )
        return self


class Pods(Part):
    """Distribution of ranks over pods, and what each pod needs of its node."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "!has(self.resources) || !((has(self.resources.requests)"
                    " && self.gpuResource in self.resources.requests)"
                    " || (has(self.resources.limits) && self.gpuResource in self.resources.limits))",
                    "message": "spec.pods.resources: the number of GPUs is pods.ranksPerPod; set that, and remove"
                    " pods.gpuResource from requests and limits",
                },
                {
                    "rule": "self.gpuAllocation != 'ResourceClaims'"
                    " || (has(self.resourceClaims) && self.resourceClaims.size() > 0)",
                    "message": "spec.pods.gpuAllocation: ResourceClaims needs a claim for the GPUs; set"
                    " pods.resourceClaims, or DevicePlugin",
                },
            ]
        }
    )

    ranks_per_pod: Annotated[Integer, Field(ge=1, le=64)] = 1
    """Ranks per pod; on GPUs also the number of GPUs that a pod requests, or that its claims must allocate."""
    device: Device = Device.CUDA
    """cuda requests one GPU per rank, cpu none."""
    gpu_resource: Annotated[str, Field(max_length=317, pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")] = "nvidia.com/gpu"
    """Resource name of the nodes' GPUs, with gpuAllocation DevicePlugin."""
    gpu_allocation: GpuAllocation = GpuAllocation.DEVICE_PLUGIN
    """What allocates the GPUs of pods with device cuda: DevicePlugin (gpuResource) or ResourceClaims. The claims must
    then allocate as many GPUs as a pod has ranks."""
    resource_claims: list[PodResourceClaim] = Field(
        default=[],
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """Devices that each pod claims besides GPUs of a device plugin, or instead of them, such as GPUs and network
    devices. Kubernetes has this from 1.34 on, and before behind the feature gate DynamicResourceAllocation."""
    resources: ComputeResources = ComputeResources()
    """Resources of each pod besides its GPUs."""
    runtime_class_name: DnsName | None = None
    """RuntimeClass of the pods, such as nvidia. Default: the container runtime's default."""
    host_network: Boolean = False
    """Use the node's network, for devices that need it, such as some RDMA networks. Then ports 5557, 8000, 9000,
    9001 and 29500 of the node must be free, a node runs one pod with each port, NetworkPolicies do not apply, and the
    namespace must admit privileged pods."""

    @model_validator(mode="after")
    def _claims_fit(self) -> Self:
        names = [claim.name for claim in self.resource_claims]
        if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
            raise misplaced("resourceClaims", twice, "is the name of two claims; choose another name for one of them")
        if self.gpu_allocation is GpuAllocation.RESOURCE_CLAIMS and not names:
            fix = "needs a claim for the GPUs; set pods.resourceClaims, or DevicePlugin"
            raise misplaced("gpuAllocation", self.gpu_allocation.value, fix)
        return self

    @model_validator(mode="after")
    def _gpus_are_counted_by_ranks(self) -> Self:
        for field in ("requests", "limits"):
            amounts: dict[str, ResourceQuantity] = getattr(self.resources, field)
            if self.gpu_resource in amounts:
                message = "is the number of GPUs, which is pods.ranksPerPod; remove it here"
                raise misplaced(f"resources.{field}.{self.gpu_resource}", amounts[self.gpu_resource].text, message)
        return self
