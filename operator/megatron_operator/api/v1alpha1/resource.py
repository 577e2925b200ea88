"""The resource ``MegatronInference``: one model, served by a number of replica groups."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import ConfigDict, Field, model_validator

from megatron_operator.api.quantity import MemorySize
from megatron_operator.api.v1alpha1.base import Integer, Part, Report, Text, misplaced
from megatron_operator.api.v1alpha1.expose import Expose
from megatron_operator.api.v1alpha1.model import AdapterSpec, Model
from megatron_operator.api.v1alpha1.operations import (
    AutoSuspendSpec,
    DisruptionSpec,
    FailurePolicy,
    ImagePullPolicy,
    Lifecycle,
    PodTemplate,
    Restart,
    RolloutSpec,
    Scheduling,
)
from megatron_operator.api.v1alpha1.pods import Device, Pods
from megatron_operator.api.v1alpha1.serving import EngineSpec, Frontend, Parallelism, RoutingPolicy, RoutingSpec
from megatron_operator.api.v1alpha1.status import MegatronInferenceStatus

GROUP = "inference.megatron.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "MegatronInference"
PLURAL = "megatroninferences"

ORPHAN_FINALIZER = "orphan"
"""Finalizer of Kubernetes, until the garbage collector has removed the owner references of the children."""

LONGEST_NAME = 40
NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""Service names must start with a letter, and pod names append to the resource's name."""


CPU_KV_CACHE = MemorySize("1Gi")
"""Default size of the KV cache of a rank on CPUs."""
MAX_RANKS = 1024
"""Ranks of one replica group."""
MAX_PODS = 1024
"""Pods of one resource. The operator reads all of them in each round."""


_RANKS = (
    "self.parallelism.pipeline * (self.parallelism.tensor > self.parallelism.expert"
    " ? self.parallelism.tensor : self.parallelism.expert)"
)
"""CEL: the ranks of one replica group, as ``Parallelism.ranks`` counts them."""


class MegatronInferenceSpec(Part):
    """The desired state of a MegatronInference."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "self.engine.prefixCaching"
                    " || !(self.routing.policy in ['LongestPrefix', 'FirstPrefixBlock'])",
                    "message": "spec.routing.policy: routes by cached prefixes, but engine.prefixCaching is false;"
                    " set it to true, or choose RoundRobin or LoadBalanced",
                },
                {
                    "rule": f"self.pods.ranksPerPod <= {_RANKS}",
                    "message": "spec.pods.ranksPerPod: a replica group has parallelism.pipeline *"
                    " max(parallelism.tensor, parallelism.expert) ranks; set ranksPerPod to that number or less",
                },
                {
                    "rule": f"{_RANKS} <= {MAX_RANKS}",
                    "message": "spec.parallelism.tensor: a replica group has parallelism.pipeline *"
                    f" max(parallelism.tensor, parallelism.expert) ranks, at most {MAX_RANKS}; set lower numbers",
                },
                {
                    "rule": f"self.replicas * (({_RANKS} + self.pods.ranksPerPod - 1) / self.pods.ranksPerPod)"
                    f" <= {MAX_PODS}",
                    "message": "spec.replicas: a resource has replicas * pipeline * max(tensor, expert) / ranksPerPod"
                    f" pods, at most {MAX_PODS}; set a lower number, or raise pods.ranksPerPod",
                },
            ]
        }
    )

    replicas: Annotated[Integer, Field(ge=1, le=1024)] = 1
    """Number of replica groups. Each has a full copy of the model (data parallelism)."""
    lifecycle: Lifecycle = Lifecycle.RUNNING
    """Running, Paused (requests wait), Suspended (requests wait, and memory is released) or Stopped (no pods)."""
    model: Model
    """The model that is served."""
    adapters: list[AdapterSpec] = Field(
        default=[],
        max_length=64,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """LoRA adapters of the model. A change is a rollout. More can be loaded while the pods run, by
    /v1/load_lora_adapter."""
    parallelism: Parallelism = Parallelism()
    """Number of ranks that share one copy of the model."""
    pods: Pods = Pods()
    """Distribution of ranks over pods, and what each pod needs of its node."""
    engine: EngineSpec = EngineSpec()
    """The engine of each replica group."""
    routing: RoutingSpec = RoutingSpec()
    """Distribution of requests over the replica groups."""
    frontend: Frontend = Frontend()
    """The HTTP frontend, in the first pod of every replica group."""
    expose: Expose = Expose()
    """How clients reach the HTTP frontend."""
    scheduling: Scheduling = Scheduling()
    """Scheduling of the pods."""
    failure_policy: FailurePolicy = FailurePolicy()
    """What happens when a replica group fails."""
    rollout: RolloutSpec = RolloutSpec()
    """How running pods are replaced."""
    disruption: DisruptionSpec = DisruptionSpec()
    """Drains of nodes, and evictions."""
    auto_suspend: AutoSuspendSpec = AutoSuspendSpec()
    """Whether an idle engine is suspended to release its memory."""
    restart: Restart = Restart()
    """Requests a restart without another change."""
    image: Text | None = None
    """Image of the runtime. Default: the operator's default image for `pods.device`."""
    image_pull_policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT
    """When the kubelet pulls the image: Always, IfNotPresent or Never."""
    pod_template: PodTemplate = PodTemplate()
    """Overrides for every pod."""

    @model_validator(mode="after")
    def _adapters_have_different_names(self) -> Self:
        names = [adapter.name for adapter in self.adapters]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise misplaced(
                    f"adapters[{index}].name", name, "is the name of another adapter too; choose another one"
                )
        return self

    @model_validator(mode="after")
    def _ranks_fill_their_pods(self) -> Self:
        ranks, per_pod = self.parallelism.ranks, self.pods.ranks_per_pod
        if per_pod > ranks:
            message = (
                f"is more than the {ranks} rank(s) of a replica group (pipeline * max(tensor, expert)); set it to "
                f"{ranks} or less"
            )
            raise misplaced("pods.ranksPerPod", per_pod, message)
        return self

    @model_validator(mode="after")
    def _size_is_limited(self) -> Self:
        ranks, pods = self.parallelism.ranks, self.replicas * self.pods_per_group
        if ranks > MAX_RANKS:
            message = (
                f"gives a replica group {ranks} ranks (pipeline * max(tensor, expert)), at most {MAX_RANKS} are "
                "possible; lower these"
            )
            raise misplaced("parallelism.tensor", self.parallelism.tensor, message)
        if pods > MAX_PODS:
            message = (
                f"makes {pods} pods ({self.pods_per_group} per replica group), at most {MAX_PODS} are possible; "
                "lower it, or raise pods.ranksPerPod"
            )
            raise misplaced("replicas", self.replicas, message)
        return self

    @model_validator(mode="after")
    def _prefixes_that_decide_the_route_are_cached(self) -> Self:
        policy = self.routing.policy
        if (
            policy in (RoutingPolicy.FIRST_PREFIX_BLOCK, RoutingPolicy.LONGEST_PREFIX)
            and not self.engine.prefix_caching
        ):
            message = (
                "routes by cached prefixes, but engine.prefixCaching is false; set that to true, or choose RoundRobin "
                "or LoadBalanced"
            )
            raise misplaced("routing.policy", policy.value, message)
        return self

    @property
    def pods_per_group(self) -> int:
        """Number of pods of a replica group."""
        return -(-self.parallelism.ranks // self.pods.ranks_per_pod)

    @property
    def kv_cache_memory(self) -> MemorySize | None:
        """Size of each rank's KV cache; None: a rank measures the memory of its GPU."""
        if self.engine.kv_cache_memory is None and self.pods.device is Device.CPU:
            return CPU_KV_CACHE
        return self.engine.kv_cache_memory

    def ranks_in_pod(self, index: int) -> int:
        """Number of ranks in a pod of a replica group; the last pod may have fewer."""
        per_pod = self.pods.ranks_per_pod
        return min(per_pod, self.parallelism.ranks - index * per_pod)


class ObjectMeta(Report):
    """The part of Kubernetes' object metadata that the operator reads."""

    name: Annotated[str, Field(max_length=LONGEST_NAME, pattern=NAME_PATTERN)]
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    deletion_timestamp: str | None = None
    finalizers: tuple[str, ...] = ()


class MegatronInference(Part):
    """A language model served by Megatron: one resource, many ranks, an OpenAI endpoint, and a declared pause."""

    model_config = ConfigDict(extra="ignore")
    kind: ClassVar[str] = KIND
    api_version: ClassVar[str] = API_VERSION

    metadata: ObjectMeta
    """Kubernetes' object metadata."""
    spec: MegatronInferenceSpec
    """The desired state."""
    status: MegatronInferenceStatus = MegatronInferenceStatus()
    """The observed state."""

    @property
    def name(self) -> str:
        """The resource's name."""
        return self.metadata.name

    @property
    def namespace(self) -> str:
        """The resource's namespace."""
        return self.metadata.namespace

    @property
    def served_name(self) -> str:
        """The model's name in the OpenAI API."""
        return self.spec.model.served_name or self.metadata.name

    @property
    def deleting(self) -> bool:
        """Whether the resource is being deleted, so that nothing may be created for it."""
        return self.metadata.deletion_timestamp is not None

    @property
    def leaves_children(self) -> bool:
        """Whether it is being deleted without its children (``kubectl delete --cascade=orphan``)."""
        return self.deleting and ORPHAN_FINALIZER in self.metadata.finalizers
