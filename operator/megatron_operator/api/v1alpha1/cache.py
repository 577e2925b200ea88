"""``spec.model.cache``: where a downloaded model is kept for all pods of the resource."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import ConfigDict, Field, model_validator

from megatron_operator.api.quantity import MemorySize
from megatron_operator.api.v1alpha1.base import AbsolutePath, DnsName, LabelValue, Part, require_one

ONE_PLACE = "exactly one of claimName, volumeClaim and hostPath must say where the cache is"
ONE_CHOICE = "exactly one of nodes and nodeSelector must say which nodes get the model"


class CacheAccessMode(StrEnum):
    """Access modes of a volume claim that several pods can share."""

    READ_WRITE_ONCE = "ReadWriteOnce"
    READ_WRITE_MANY = "ReadWriteMany"


class CacheClaim(Part):
    """A volume claim that the operator creates for the source of the model."""

    size: MemorySize
    """Size of the volume. It can be raised later if the StorageClass permits that."""
    storage_class_name: DnsName | None = None
    """StorageClass of the volume. Default: the cluster's default class."""
    access_modes: list[CacheAccessMode] = Field(default=[CacheAccessMode.READ_WRITE_MANY], min_length=1, max_length=2)
    """ReadWriteMany, or ReadWriteOnce if all pods run on one node."""


class CacheFolder(Part):
    """A folder of the nodes, filled by a Job on each chosen node. Pods run only on the nodes that have the model."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "(has(self.nodes) && self.nodes.size() > 0)"
                    " != (has(self.nodeSelector) && self.nodeSelector.size() > 0)",
                    "message": f"spec.model.cache.hostPath: {ONE_CHOICE}; set one",
                }
            ]
        }
    )

    path: AbsolutePath
    """The folder on each node, created if it does not exist. The namespace must admit privileged pods."""
    nodes: list[DnsName] = Field(default=[], max_length=256)
    """Names of the nodes that get the model."""
    node_selector: dict[str, LabelValue] = Field(default={})
    """Labels of the nodes that get the model, also of nodes that join later. The operator must be allowed to list
    nodes."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if bool(self.nodes) == bool(self.node_selector):
            fix = "both are set: remove one" if self.nodes else "neither is set: set one"
            raise ValueError(f"{ONE_CHOICE}, {fix}")
        return self


class Cache(Part):
    """A cache for a downloaded model: exactly one of the fields."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "(has(self.claimName) ? 1 : 0) + (has(self.volumeClaim) ? 1 : 0)"
                    " + (has(self.hostPath) ? 1 : 0) == 1",
                    "message": f"spec.model.cache: {ONE_PLACE}; set one",
                }
            ]
        }
    )

    claim_name: DnsName | None = None
    """Name of an existing PersistentVolumeClaim in the resource's namespace. Several resources may share it."""
    volume_claim: CacheClaim | None = None
    """A PersistentVolumeClaim that the operator creates, and deletes with the resource or after a change of the
    source."""
    host_path: CacheFolder | None = None
    """A folder of the nodes."""

    @property
    def is_shared(self) -> bool:
        """Whether folders of other resources may lie beside the one of this resource."""
        return self.volume_claim is None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        require_one(self, ONE_PLACE)
        return self
