"""Parallelism of the model, and settings of the engine and the HTTP frontend."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, Strict, model_validator

from megatron_operator.api.quantity import MemorySize
from megatron_operator.api.v1alpha1.base import AbsolutePath, Boolean, DnsName, Integer, Part, Text, misplaced

Degree = Annotated[Integer, Field(ge=1, le=1024)]


class KVCacheManagement(StrEnum):
    """What happens to the KV cache while the engine is suspended."""

    PERSIST = "Persist"
    OFFLOAD = "Offload"
    RECOMPUTE = "Recompute"


class SpeculationMethod(StrEnum):
    """Where the drafted tokens come from."""

    PROMPT_LOOKUP = "PromptLookup"
    DRAFT_MODEL = "DraftModel"


class RoutingPolicy(StrEnum):
    """How the coordinator selects the replica group for a request."""

    AUTO = "Auto"
    ROUND_ROBIN = "RoundRobin"
    LOAD_BALANCED = "LoadBalanced"
    FIRST_PREFIX_BLOCK = "FirstPrefixBlock"
    LONGEST_PREFIX = "LongestPrefix"


class Pooling(StrEnum):
    """The hidden states that embeddings are made of."""

    LAST = "Last"
    MEAN = "Mean"


class Parser(StrEnum):
    """Parsers for tool calls and reasoning in the model's output."""

    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    PYTHONIC = "pythonic"
    QWEN3_CODER = "qwen3_coder"
    OPENAI = "openai"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    GLM45 = "glm45"
    KIMI_K2 = "kimi_k2"
    MINIMAX_M2 = "minimax_m2"
    GRANITE = "granite"
    PHI4_MINI_JSON = "phi4_mini_json"
    GEMMA3 = "gemma3"
    LLAMA4_PYTHONIC = "llama4_pythonic"
    DEEPSEEK_R1 = "deepseek_r1"
    QWEN3 = "qwen3"
    OPENAI_GPTOSS = "openai_gptoss"


REASONING_PARSERS = (Parser.DEEPSEEK_R1, Parser.QWEN3, Parser.OPENAI_GPTOSS)
"""Parsers only for reasoning."""
BOTH_PARSERS = (Parser.DEEPSEEK_V3, Parser.GLM45, Parser.KIMI_K2, Parser.MINIMAX_M2, Parser.GRANITE)
"""Parsers for tool calls and reasoning; beside another parser, for what that one does not parse."""
TOOL_PARSERS = tuple(parser for parser in Parser if parser not in (*REASONING_PARSERS, *BOTH_PARSERS))
"""Parsers only for tool calls."""


def _same_purpose(kind: tuple[Parser, ...]) -> str:
    """A CEL expression: at most one of the parsers is of this kind."""
    return f"self.parsers.filter(p, p in {[each.value for each in kind]}).size() <= 1"


class Parallelism(Part):
    """Number of ranks that share one copy of the model."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "self.expert % self.tensor == 0 || self.tensor % self.expert == 0",
                    "message": "spec.parallelism.expert: the tensor and expert parallel ranks of a layer are the same"
                    " ranks; set it to a divisor or a multiple of parallelism.tensor",
                }
            ]
        }
    )

    tensor: Degree = 1
    """Tensor parallelism: ranks that share each layer's matrices."""
    pipeline: Degree = 1
    """Pipeline parallelism: stages that the layers are divided into."""
    expert: Degree = 1
    """Expert parallelism: number of parts that a layer's experts are divided into; a divisor or a multiple of tensor.
    Beyond tensor, each rank holds whole experts, and the other weights are replicated expert / tensor times."""

    @model_validator(mode="after")
    def _expert_and_tensor_parallel_ranks_fill_a_stage(self) -> Self:
        if self.tensor % self.expert and self.expert % self.tensor:
            message = (
                f"does not divide the {self.tensor} tensor parallel rank(s) of a layer, and is not a multiple of them; "
                "set it to a divisor or a multiple"
            )
            raise misplaced("expert", self.expert, message)
        return self

    @property
    def ranks(self) -> int:
        """Number of ranks of a replica group."""
        return self.pipeline * max(self.tensor, self.expert)


class Speculation(Part):
    """Tokens that a step verifies for a request besides its next one."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": "has(self.draftModel) == (self.method == 'DraftModel')",
                    "message": "spec.engine.speculation.draftModel: belongs to method DraftModel, which needs it; set"
                    " both, or remove draftModel",
                }
            ]
        }
    )

    method: SpeculationMethod = SpeculationMethod.PROMPT_LOOKUP
    """PromptLookup: those that followed the last occurrence of the request's latest tokens. DraftModel: those that
    draftModel predicts; not with pipeline parallelism."""
    draft_model: AbsolutePath | None = None
    """An absolute path in the container: the GGUF file or folder of a small model with the same vocabulary. It is part
    of the image, podTemplate mounts it, or it is below /models, where the volume of
    model.source.persistentVolumeClaim or model.source.image is mounted."""
    num_tokens: Annotated[Integer, Field(ge=1, le=64)] = 7
    """Maximum tokens of a request in a step. Fewer are used while they are wrong, and none if they stay so."""

    @model_validator(mode="after")
    def _a_draft_model_belongs_to_its_method(self) -> Self:
        if (self.draft_model is None) == (self.method is SpeculationMethod.DRAFT_MODEL):
            message = f"belongs to method DraftModel, which needs it, and the method is {self.method.value}; set both"
            raise misplaced("draftModel", self.draft_model, f"{message}, or remove draftModel")
        return self


class EngineSpec(Part):
    """The engine of each replica group."""

    block_size_tokens: Annotated[Integer, Field(ge=1, le=1024)] = 16
    """Tokens in one block of the KV cache."""
    kv_cache_memory: MemorySize | None = None
    """Memory per rank for the KV cache, like 256Mi or 20Gi. Default: 1Gi with pods.device cpu; with cuda 0.9 of the
    GPU memory that the weights and the largest pass leave, which each rank measures."""
    max_requests: Annotated[Integer, Field(ge=1, le=65536)] = 256
    """Maximum number of requests that run at the same time; further ones wait in a queue."""
    mamba_memory_ratio: Annotated[float, Strict(), Field(ge=0, le=0.999)] | None = None
    """Most of the KV cache's memory for the recurrent states of running requests, of a model with recurrent layers, as
    Qwen3-Next and Nemotron-H. Default, and 0: as much as the states of maxRequests requests."""
    prefix_caching: Boolean = True
    """Compute common prefixes of prompts once, and keep them in the KV cache while there is room."""
    prefix_caching_mamba_gb: Annotated[float, Strict(), Field(ge=0)] | None = None
    """GiB of the KV cache's memory for copies of recurrent states at the ends of cached prefixes; 0: no prefix caching
    of models with recurrent layers. Default: chosen by the engine. Without effect for other models."""
    chunked_prefill: Boolean = True
    """Process long prompts in chunks, between the decoding steps of other requests."""
    speculation: Speculation | None = None
    """Speculative decoding: several tokens per step for answers that repeat their context, or that a smaller model
    predicts, with the same tokens as without. Default: none."""
    kv_cache_management: KVCacheManagement = KVCacheManagement.OFFLOAD
    """While suspended, the KV cache stays (Persist), moves to host memory (Offload), or is dropped and recomputed
    (Recompute)."""
    offload_weights: Boolean = False
    """Move the weights to host memory too while suspended."""
    extra_args: list[Text] = Field(default=[], max_length=64)
    """Additional flags for megatron-serve, one per item, appended to the rendered ones."""


class RoutingSpec(Part):
    """Distribution of requests over the replica groups."""

    policy: RoutingPolicy = RoutingPolicy.AUTO
    """Auto: LongestPrefix with engine.prefixCaching, LoadBalanced without. RoundRobin: in turn. LoadBalanced: the
    replica group with the fewest requests. LongestPrefix: the one that has most of the prompt's prefix in its cache,
    unless it is much busier. FirstPrefixBlock considers only the first block of the prompt. These two need
    engine.prefixCaching."""
    alpha: Annotated[float, Strict(), Field(ge=0, le=1)] = 0.5
    """Weight of cached prefixes against free capacity: 0 considers capacity only, 1 prefixes only."""


class ApiKeysSecret(Part):
    """A Secret with the accepted API keys."""

    name: DnsName
    """Name of the Secret, in the resource's namespace."""
    key: Text = "api-keys"
    """Key within the Secret. Its value has one API key per line. A change takes effect without a restart."""


class Frontend(Part):
    """The HTTP frontend, in the first pod of every replica group."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                {
                    "rule": f"!has(self.parsers) || ({_same_purpose(TOOL_PARSERS)}"
                    f" && {_same_purpose(REASONING_PARSERS)} && {_same_purpose(BOTH_PARSERS)})",
                    "message": "spec.frontend.parsers: two of them have the same purpose; choose at most one for tools"
                    " and one for reasoning",
                }
            ]
        }
    )

    replicas: Annotated[Integer, Field(ge=1, le=64)] = 1
    """Number of processes that share the HTTP port."""
    api_keys_secret: ApiKeysSecret | None = None
    """Requests must carry one of this Secret's keys as a bearer token. Default: no authentication."""
    parsers: list[Parser] = Field(default=[], max_length=2)
    """Parsers for tool calls (hermes, llama3_json, mistral, pythonic, qwen3_coder, openai, deepseek_v31,
    phi4_mini_json, gemma3, llama4_pythonic), reasoning (deepseek_r1, qwen3, openai_gptoss) or both (deepseek_v3, glm45,
    kimi_k2, minimax_m2, granite), at most one of each kind. Beside one for a single purpose, one for both serves the
    other purpose. The default tool parser matches the model's chat template. Both parsers of gpt-oss are active by
    default."""
    shared_prefix_cache: Boolean = False
    """Let requests with different API keys use each other's cached prefixes. They are answered sooner, and their users
    can find out what the others asked, by the time of an answer and by cached_tokens."""
    generation_config: Text = "auto"
    """Sampling defaults of requests: auto (generation_config.json of the checkpoint, if it has one), vllm (none), or
    the path of such a file or its folder in the container."""
    pooling: Pooling = Pooling.LAST
    """The hidden states that /v1/embeddings and /v1/score use: of the last token of an input (Last), or the mean over
    its tokens (Mean), which uses no cached prefixes."""
    trust_request_chat_template: Boolean = False
    """Accept chat templates in requests, which are programs without limits of time and memory."""
    media_placeholder: Boolean = False
    """Replace images, audio, videos and files of messages, which the models can't read, by a text like [image]. By
    default such requests get 400."""
    page: Boolean = True
    """Serve a web page at /, to chat with the model and to monitor the service."""

    @model_validator(mode="after")
    def _there_is_one_parser_of_a_kind(self) -> Self:
        for kind in (TOOL_PARSERS, REASONING_PARSERS, BOTH_PARSERS):
            same = [parser.value for parser in self.parsers if parser in kind]
            if len(same) > 1:
                raise misplaced("parsers", same, "these have the same purpose; remove all but one of them")
        return self
