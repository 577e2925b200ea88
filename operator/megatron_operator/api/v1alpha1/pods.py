"""The pods of a replica group: ranks, devices, and what each pod requests of its node."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from megatron_operator.api.quantity import ResourceQuantity
from megatron_operator.api.v1alpha1.base import Boolean, DnsName, Integer, Part, misplaced


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
                }
            ]
        }
    )

    ranks_per_pod: Annotated[Integer, Field(ge=1, le=64)] = 1
    """Ranks per pod; on GPUs also the number of GPUs that a pod requests."""
    device: Device = Device.CUDA
    """cuda requests one GPU per rank, cpu none."""
    gpu_resource: Annotated[str, Field(max_length=317, pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")] = "nvidia.com/gpu"
    """Resource name of the nodes' GPUs."""
    resources: ComputeResources = ComputeResources()
    """Resources of each pod besides its GPUs."""
    runtime_class_name: DnsName | None = None
    """RuntimeClass of the pods, such as nvidia. Default: the container runtime's default."""
    host_network: Boolean = False
    """Use the node's network, for devices that need it, such as some RDMA networks. Then ports 5557, 8000, 9000,
    9001 and 29500 of the node must be free, a node runs one pod with each port, NetworkPolicies do not apply, and the
    namespace must admit privileged pods."""

    @model_validator(mode="after")
    def _gpus_are_counted_by_ranks(self) -> Self:
        for field in ("requests", "limits"):
            amounts: dict[str, ResourceQuantity] = getattr(self.resources, field)
            if self.gpu_resource in amounts:
                message = "is the number of GPUs, which is pods.ranksPerPod; remove it here"
                raise misplaced(f"resources.{field}.{self.gpu_resource}", amounts[self.gpu_resource].text, message)
        return self
