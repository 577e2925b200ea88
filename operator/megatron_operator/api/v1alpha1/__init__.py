"""Version v1alpha1 of the resource."""

from __future__ import annotations

from megatron_operator.api.v1alpha1.expose import Expose, HTTPRouteExposure, IngressExposure, ParentRef, ServiceType
from megatron_operator.api.v1alpha1.model import DType, HuggingFaceSource, ImageSource, Model, Source, VolumeSource
from megatron_operator.api.v1alpha1.operations import (
    AutoSuspend,
    FailurePolicy,
    ImagePullPolicy,
    Lifecycle,
    PodTemplate,
    Restart,
    Rollout,
    Scheduling,
)
from megatron_operator.api.v1alpha1.resource import (
    API_VERSION,
    GROUP,
    KIND,
    PLURAL,
    VERSION,
    MegatronInference,
    Metadata,
    Spec,
)
from megatron_operator.api.v1alpha1.serving import (
    Device,
    Engine,
    Frontend,
    KVCacheManagement,
    Parallelism,
    Parser,
    Pods,
    Routing,
    RoutingPolicy,
)
from megatron_operator.api.v1alpha1.status import Condition, ConditionType, GroupStatus, LastFailure, Phase, Status

__all__ = [
    "API_VERSION",
    "GROUP",
    "KIND",
    "PLURAL",
    "VERSION",
    "AutoSuspend",
    "Condition",
    "ConditionType",
    "DType",
    "Device",
    "Engine",
    "Expose",
    "FailurePolicy",
    "Frontend",
    "GroupStatus",
    "HTTPRouteExposure",
    "HuggingFaceSource",
    "ImagePullPolicy",
    "ImageSource",
    "IngressExposure",
    "KVCacheManagement",
    "LastFailure",
    "Lifecycle",
    "MegatronInference",
    "Metadata",
    "Model",
    "Parallelism",
    "ParentRef",
    "Parser",
    "Phase",
    "PodTemplate",
    "Pods",
    "Restart",
    "Rollout",
    "Routing",
    "RoutingPolicy",
    "Scheduling",
    "ServiceType",
    "Source",
    "Spec",
    "Status",
    "VolumeSource",
]
