"""How the model is laid out over ranks and pods, and how the engine and the HTTP frontend run."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, Strict, model_validator

from megatron_operator.api.quantity import MemorySize
from megatron_operator.api.v1alpha1.base import Boolean, DnsName, Integer, Part, Text, misplaced

Degree = Annotated[Integer, Field(ge=1, le=4096)]


class Device(StrEnum):
    """What a rank computes on."""

    CPU = "cpu"
    CUDA = "cuda"


class KVCacheManagement(StrEnum):
    """What becomes of the KV cache while the engine is suspended."""

    PERSIST = "Persist"
    OFFLOAD = "Offload"
    RECOMPUTE = "Recompute"


class RoutingPolicy(StrEnum):
    """How the coordinator picks the replica group of a request."""

    ROUND_ROBIN = "RoundRobin"
    LOAD_BALANCED = "LoadBalanced"
    FIRST_PREFIX_BLOCK = "FirstPrefixBlock"
    LONGEST_PREFIX = "LongestPrefix"


class Parser(StrEnum):
    """What finds calls of tools and thoughts in the words of a model."""

    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    PYTHONIC = "pythonic"
    QWEN3_CODER = "qwen3_coder"
    DEEPSEEK_R1 = "deepseek_r1"
    QWEN3 = "qwen3"


TOOL_PARSERS = (Parser.HERMES, Parser.LLAMA3_JSON, Parser.MISTRAL, Parser.PYTHONIC, Parser.QWEN3_CODER)


class Parallelism(Part):
    """Over how many ranks one copy of the model is spread."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "self.tensor % self.expert == 0",
                    "message": "spec.parallelism.expert: a layer's experts are divided over its tensor parallel ranks;"
                    " set it to a number that divides parallelism.tensor",
                }
            ]
        }
    )

    tensor: Degree = 1
    """Ranks that share each layer's matrices."""
    pipeline: Degree = 1
    """Stages that the layers are spread over."""
    expert: Degree = 1
    """Groups of a layer's ranks that the experts of a mixture-of-experts model are divided over; divides tensor."""

    @model_validator(mode="after")
    def _experts_are_divided_over_the_ranks_of_a_layer(self) -> Self:
        if self.tensor % self.expert:
            message = (
                f"does not divide the {self.tensor} tensor parallel rank(s) that a layer's experts are divided over; "
                "set it to a number that does"
            )
            raise misplaced("expert", self.expert, message)
        return self

    @property
    def ranks(self) -> int:
        """Ranks of one replica group."""
        return self.tensor * self.pipeline


class Pods(Part):
    """How ranks are put into pods."""

    ranks_per_pod: Annotated[Integer, Field(ge=1, le=64)] = 1
    """Ranks in one pod; on GPUs that is the number of GPUs a pod asks for."""
    device: Device = Device.CUDA
    """cuda asks for one GPU a rank, cpu for none."""
    gpu_resource: Annotated[str, Field(max_length=317, pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")] = "nvidia.com/gpu"
    """The resource name under which the nodes offer GPUs."""


class Engine(Part):
    """The engine of each replica group."""

    block_size_tokens: Annotated[Integer, Field(ge=1, le=1024)] = 16
    """Tokens in one block of the KV cache."""
    kv_cache_memory: MemorySize = MemorySize("1Gi")
    """Memory of each rank for the KV cache, like 256Mi or 20Gi."""
    max_requests: Annotated[Integer, Field(ge=1, le=65536)] = 256
    """Most requests that are computed at the same time; more wait in a queue."""
    prefix_caching: Boolean = True
    """Compute the common beginning of several prompts once, and keep it until its room is needed."""
    chunked_prefill: Boolean = True
    """Read long prompts in chunks between the steps of other requests."""
    kv_cache_management: KVCacheManagement = KVCacheManagement.OFFLOAD
    """While suspended, the KV cache stays (Persist), moves to host memory (Offload), or is dropped and computed
    again (Recompute)."""
    offload_weights: Boolean = False
    """Move the weights to host memory as well while suspended."""
    extra_args: list[Text] = Field(default=[], max_length=64)
    """Further flags for megatron-serve, one word each, appended to those that the operator renders."""


class Routing(Part):
    """How requests are spread over the replica groups."""

    policy: RoutingPolicy = RoutingPolicy.ROUND_ROBIN
    """RoundRobin: one group after the other. LoadBalanced: the one with the fewest requests. LongestPrefix: the one
    that knows most of the prompt's beginning, unless it is much busier; FirstPrefixBlock looks at the first block of
    the prompt only. Both need engine.prefixCaching."""
    alpha: Annotated[float, Strict(), Field(ge=0, le=1)] = 0.5
    """Weight of a known prefix against free places when prefixes decide: 0 looks at places only, 1 at prefixes only."""


class ApiKeysSecret(Part):
    """A Secret with the keys that requests must carry."""

    name: DnsName
    """Name of the Secret, in the resource's namespace."""
    key: Text = "api-keys"
    """Key within the Secret; its value holds one API key a line. A change takes effect without a restart."""


class Frontend(Part):
    """The HTTP frontend, in the first pod of every group."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "!has(self.parsers)"
                    f" || (self.parsers.filter(p, p in {[each.value for each in TOOL_PARSERS]}).size() <= 1"
                    f" && self.parsers.filter(p, !(p in {[each.value for each in TOOL_PARSERS]})).size() <= 1)",
                    "message": "spec.frontend.parsers: two of them are for the same; choose at most one for tools and"
                    " one for reasoning",
                }
            ]
        }
    )

    replicas: Annotated[Integer, Field(ge=1, le=64)] = 1
    """Processes that share the HTTP port."""
    api_keys_secret: ApiKeysSecret | None = None
    """Requests must carry one of this Secret's keys as a bearer token; anyone may ask when left out."""
    parsers: list[Parser] = Field(default=[], max_length=2)
    """What finds calls of tools (hermes, llama3_json, mistral, pythonic, qwen3_coder) and reasoning (deepseek_r1,
    qwen3) in answers, at most one of each kind. Without one for tools it is the one that fits the model's chat
    template."""
    page: Boolean = True
    """Serve a page at / to chat with the model and to watch the service."""

    @model_validator(mode="after")
    def _there_is_one_parser_of_a_kind(self) -> Self:
        for kind in (True, False):
            same = [parser.value for parser in self.parsers if (parser in TOOL_PARSERS) is kind]
            if len(same) > 1:
                raise misplaced("parsers", same, "these are for the same; leave all but one of them out")
        return self
