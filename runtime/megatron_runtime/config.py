"""The configuration of the engine, and its enumerations."""

from __future__ import annotations

import logging
import warnings
from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.setting_ranges import check_routing_alpha, check_state_memory
from megatron_runtime.unavailable_settings import UnavailableSettings

__all__ = [
    "AsyncScheduleMode",
    "CudaGraphSizingDistribution",
    "InferenceConfig",
    "KVCacheManagementMode",
    "PrefixCachingCoordinatorPolicy",
    "PrefixCachingEvictionPolicy",
]

_logger = logging.getLogger(__name__)

KV_CACHE_DTYPES = ("auto", "fp8")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
SAMPLING_BACKENDS = ("torch", "flashinfer")
CUDA_SHARE = 0.9
"""Default fraction, for the KV cache, of the memory of a GPU that weights and the largest pass leave."""
CUDA_TOKENS_PER_PASS = 16384
"""Default of the most tokens in one forward pass on a GPU."""
CPU_TOKENS_PER_PASS = 1024
"""The same on a CPU: a larger pass would delay all other requests by seconds."""
PROMPT_LOGIT_BYTES, PROMPT_LOGIT_BYTES_ON_GPU = 32 * 2**20, 256 * 2**20
"""Most bytes of the logits of prompts in one forward pass, of which log probabilities take further copies."""
DEFAULT_MAX_REQUESTS = 256
"""Default of the most requests in one forward pass, if the pool has as many blocks."""
SAME_VOCABULARY = "use a draft model with the same vocabulary, usually a smaller one of the same family"
"""The remedy for a draft model whose tokens are not those of the served model."""

_Enum = TypeVar("_Enum", bound=StrEnum)


class KVCacheManagementMode(StrEnum):
    """What happens to the KV cache while the engine is suspended."""

    PERSIST = "persist"
    """It stays on the device."""
    OFFLOAD = "offload"
    """Its used blocks are copied to host memory, and back on resume. The pool of a CPU is in host memory already: its
    used blocks stay, and the memory of the others is released."""
    RECOMPUTE = "recompute"
    """It is dropped; unfinished requests are computed again from their tokens on resume."""


class PrefixCachingCoordinatorPolicy(StrEnum):
    """How the coordinator chooses the replica group of a request."""

    ROUND_ROBIN = "round_robin"
    LOAD_BALANCED = "load_balanced"
    FIRST_PREFIX_BLOCK = "first_prefix_block"
    LONGEST_PREFIX = "longest_prefix"


class PrefixCachingEvictionPolicy(StrEnum):
    """How long the prefix cache keeps a block that no running request uses."""

    REF_ZERO = "ref_zero"
    """Not at all: requests share only blocks that they use at the same time."""
    LRU = "lru"
    """Until its memory is needed: least recently used first, and no block before those that continue it."""


class AsyncScheduleMode(StrEnum):
    """When the next decode pass begins. The tokens are the same."""

    LEGACY = "legacy"
    """Once the tokens of the last pass are known."""
    ASYNC = "async"
    """Before, where `engine.next_pass` can: on a CUDA graph, with no drafts, edited logits or log probabilities."""


class CudaGraphSizingDistribution(StrEnum):
    """How the sizes of CUDA graphs are chosen; `engine.graph_sizes` has the rules."""

    EXPONENTIAL = "exponential"
    """The largest one is halved repeatedly."""
    LINEAR = "linear"
    """In equal steps."""


@dataclass
class InferenceConfig(UnavailableSettings):
    """The configuration of one engine.

    Megatron's fields that are not described here are in UnavailableSettings.

    Raises:
        ConfigurationError: A value is invalid; the message names the field, the value and a fix.
    """

    block_size_tokens: int = 16
    """Tokens per KV block."""
    buffer_size_gb: float | None = None
    """Size of the KV pool in GiB; None means 20 on a GPU and 2 on a CPU."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV pool in bytes; overrides ``buffer_size_gb``."""
    kv_cache_dtype: str = "auto"
    """"fp8": keys and values are rounded to E4M3, on a GPU, which halves their memory; "auto": the dtype."""
    paused_buffer_size_gb: float | None = None
    """GiB of the pool that requests may keep while they wait for a further block; beyond it they are evicted and
    computed again later. None means 0."""
    max_requests: int | None = None
    """Maximum number of requests in one forward pass; None means 256, or fewer if the pool has fewer blocks."""
    max_tokens: int | None = None
    """Maximum number of tokens in one forward pass; None means 16384 on a GPU and 1024 on a CPU."""
    max_sequence_length: int | None = 2560
    """Maximum length of a prompt and its answer in tokens; None and larger values mean the limit of the model."""
    enable_chunked_prefill: bool = True
    """Splits prompts that exceed the rest of ``max_tokens`` over several forward passes."""
    enable_prefix_caching: bool = False
    """Reuses the keys and values of an equal prefix of an earlier prompt. Off by default, because callers that change
    the model's weights without ``update_weights`` then have to call ``invalidate_prefix_cache``."""
    mamba_memory_ratio: float | None = None
    """Between 0 and 1: the most that the recurrent states of running requests take of the pool; KV blocks get the rest.
    None: at most half of it, or as much as the states of ``max_requests`` requests if that is set. An error for a model
    without recurrent layers."""
    prefix_caching_mamba_gb: float | None = None
    """GiB for copies of recurrent states at the ends of cached prefixes: beside ``buffer_size_gb``, but a part of
    ``kv_cache_memory_bytes``. 0: none, and so no prefix caching of models with recurrent layers. None: a part of the
    pool. No effect without prefix caching or recurrent layers."""
    prefix_caching_eviction_policy: PrefixCachingEvictionPolicy = PrefixCachingEvictionPolicy.LRU
    """How long the prefix cache keeps a block that no running request uses."""
    prefix_caching_coordinator_policy: PrefixCachingCoordinatorPolicy = (
        PrefixCachingCoordinatorPolicy.FIRST_PREFIX_BLOCK
    )
    """The routing policy of a coordinator that this engine launches. Without prefix caching, and for unknown prefixes,
    the prefix policies take the least loaded engines in turn."""
    offset_sampling_seed_by_dp_rank: bool = True
    """Has no effect: a request without a seed gets its own, in every replica group."""
    prefix_caching_routing_alpha: float = 0.5
    """Weight, 0 to 1, of a known prefix against a replica group's free capacity."""
    kv_cache_management_mode: KVCacheManagementMode = KVCacheManagementMode.PERSIST
    """What happens to the KV cache on suspend."""
    offload_weights: bool = False
    """Moves the weights to host memory while the engine is suspended. On a CPU they are released instead, and read from
    the checkpoint's files again on resume; weights that were set as named tensors stay, since no file has them."""
    track_paused_request_events: bool = False
    """Records an event whenever a request begins to wait for a block and keeps its cache."""
    track_generated_token_events: bool = False
    """Records an event per generated token in every request."""
    request_timeout: float | None = None
    """Seconds after which an unfinished request fails; None means no limit."""
    logprobs_mode: str = "raw_logprobs"
    """"raw_logprobs" reports the log probabilities of the model; "processed_logprobs" those of the sampled
    distribution, after penalties, biases, temperature and filters. Tokens of the prompt always have raw ones."""
    num_cuda_graphs: int | None = None
    """Most numbers of requests for which passes without prompts, and of tokens for which passes with prompts, are
    captured as CUDA graphs with their sampling when the engine is created; a draft counts as a request. -1: all sizes,
    or none if the model or its device does not permit graphs; any other number is then an error. None and 0: every pass
    runs eagerly."""
    cuda_graph_sizing_distribution: CudaGraphSizingDistribution = CudaGraphSizingDistribution.EXPONENTIAL
    """How the numbers of requests are chosen."""
    cuda_graph_max_tokens: int = 512
    """Maximum number of tokens of a graph; larger passes run eagerly."""
    use_cuda_graphs_for_non_decode_steps: bool = True
    """Whether passes with prompts are captured as well."""
    cuda_graph_mixed_prefill_count: int = 16
    """0: they are not. Otherwise without effect, because a graph with prompts permits any number of them."""
    cuda_graph_all_prefills: bool = False
    """Whether passes with prompts are captured up to ``max_tokens``."""
    async_sched_mode: AsyncScheduleMode = AsyncScheduleMode.ASYNC
    """Whether a decode pass may begin before the tokens of the last one are known."""
    batch_invariant: bool = False
    """Whether the bits of a request's results on a GPU must not depend on other requests: products with weights have a
    fixed number of rows then, which takes longer. On a CPU they never depend on others, except where PyTorch's
    attention is used."""
    num_speculative_tokens: int = 0
    """Maximum number of tokens that a pass verifies for a request besides its next one: those that followed the last
    occurrence of its latest tokens, or those of ``speculative_draft_model``, instead of the drafts of Megatron's
    prediction heads. They change no token, and are fewer where they cost more time than they save. Requests with log
    probabilities or a limit of their reasoning have none. 0: no speculation."""
    speculative_draft_model: Any = field(default=None, repr=False)
    """A small model from `load_model`, with the vocabulary of the served one, whole on each rank, which drafts these
    tokens. Its keys and values are in the blocks of the KV cache and count in its size."""
    max_loras: int = 8
    """Maximum number of LoRA adapters that are loaded at once."""
    max_lora_rank: int = 64
    """Largest r of the matrices of an adapter."""
    grammar_cache_bytes: int = 96 * 2**20
    """Most memory, about, of compiled grammars that are kept for waiting and later requests."""
    materialize_only_last_token_logits: bool = False
    """Never computes logits of prompts, and fails requests with log probabilities of them. Otherwise only the requested
    ones are computed."""
    moe_enable_routing_replay: bool = False
    """Reports the experts of every token but the last one in ``routing_indices`` of each request."""
    static_kv_memory_pointers: bool = False
    """Requires that the KV cache keeps its address during a suspension. PERSIST keeps it, and so do the other modes on
    a GPU with cuda-bindings, also without this setting; elsewhere they are an error."""
    sampling_backend: str = "torch"
    """"torch"; "flashinfer" logs a warning and is replaced by it."""
    logging_step_interval: int = 0
    """Steps between two log lines about the engine's load; 0 disables them."""
    metrics_writer: Any = None
    """Receives the same figures by its method ``log(figures)``, for example the module ``wandb`` or a run of it."""
    verbose: InitVar[bool] = False
    """Logs all settings."""

    def __post_init__(self, verbose: bool) -> None:
        self._refuse_unavailable()
        self._check_choices()
        self._check_numbers()
        self._check_flags()
        self._check_metrics()
        if verbose:
            _logger.info("%s", self)

    def _check_choices(self) -> None:
        self.kv_cache_management_mode = _member(KVCacheManagementMode, self, "kv_cache_management_mode")
        self.prefix_caching_eviction_policy = _member(
            PrefixCachingEvictionPolicy, self, "prefix_caching_eviction_policy"
        )
        self.prefix_caching_coordinator_policy = _member(
            PrefixCachingCoordinatorPolicy, self, "prefix_caching_coordinator_policy"
        )
        self.async_sched_mode = _member(AsyncScheduleMode, self, "async_sched_mode")
        self.cuda_graph_sizing_distribution = _member(
            CudaGraphSizingDistribution, self, "cuda_graph_sizing_distribution"
        )
        self._require_one_of("kv_cache_dtype", KV_CACHE_DTYPES)
        self._require_one_of("logprobs_mode", LOGPROBS_MODES)
        self._require_one_of("sampling_backend", SAMPLING_BACKENDS)
        if self.sampling_backend == "flashinfer":
            warnings.warn("sampling_backend='flashinfer' is not available; using 'torch'", stacklevel=4)
            self.sampling_backend = "torch"

    def _check_numbers(self) -> None:
        check_routing_alpha(self.prefix_caching_routing_alpha)
        check_state_memory(self.mamba_memory_ratio, self.prefix_caching_mamba_gb)
        for name in (
            "block_size_tokens",
            "cuda_graph_max_tokens",
            "max_loras",
            "max_lora_rank",
            "grammar_cache_bytes",
        ):
            self._require_whole(name)
        if self.num_cuda_graphs not in (None, 0, -1) or isinstance(self.num_cuda_graphs, bool | float):
            self._require_whole("num_cuda_graphs", "None, 0, -1 for all sizes, or a whole number of at least 1")
        for name in ("kv_cache_memory_bytes", "max_requests", "max_tokens", "max_sequence_length"):
            if getattr(self, name) is not None:
                self._require_whole(name)
        for name in ("num_speculative_tokens", "logging_step_interval", "cuda_graph_mixed_prefill_count"):
            self._require_whole(name, least=0)
        if self.speculative_draft_model is not None and not self.num_speculative_tokens:
            raise ConfigurationError(
                "speculative_draft_model has no effect with num_speculative_tokens=0; set the most tokens of a draft, "
                "for example num_speculative_tokens=4",
                field="num_speculative_tokens",
            )
        for name in ("buffer_size_gb", "request_timeout"):
            if getattr(self, name) is not None:
                self._require_positive(name)
        if self.paused_buffer_size_gb:
            self._require_positive("paused_buffer_size_gb")
        if self.max_tokens is not None and self.max_requests is not None and self.max_tokens < self.max_requests:
            raise ConfigurationError(
                f"max_tokens={self.max_tokens} is less than max_requests={self.max_requests}: a forward pass carries "
                "at least one token per request, so raise max_tokens or lower max_requests",
                field="max_tokens",
            )

    def _check_flags(self) -> None:
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name}={getattr(self, name)!r} must be true or false", field=name)

    def _check_metrics(self) -> None:
        if self.metrics_writer is None:
            return
        if not callable(getattr(self.metrics_writer, "log", None)):
            raise ConfigurationError(
                f"metrics_writer={self.metrics_writer!r} has no method log(figures); use the module wandb, or None",
                field="metrics_writer",
            )
        if self.logging_step_interval == 0:
            raise ConfigurationError(
                "metrics_writer has no effect with logging_step_interval=0; set logging_step_interval",
                field="metrics_writer",
            )

    def pool_bytes(self, device_type: str) -> int:
        """Size of the KV pool in bytes on a device of this type ("cpu", "cuda")."""
        if self.kv_cache_memory_bytes is not None:
            return self.kv_cache_memory_bytes
        if self.buffer_size_gb is not None:
            return int(self.buffer_size_gb * 2**30)
        return (2 if device_type == "cpu" else 20) * 2**30

    def _require_one_of(self, name: str, known: tuple[str, ...]) -> None:
        value: Any = getattr(self, name)
        if value not in known:
            raise ConfigurationError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}", field=name)

    def _require_whole(self, name: str, allowed: str | None = None, *, least: int = 1) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            allowed = allowed or f"a whole number of at least {least}"
            raise ConfigurationError(f"{name}={value!r} must be {allowed}", field=name)

    def _require_positive(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise ConfigurationError(f"{name}={value!r} must be a number greater than 0", field=name)


_FLAGS = (
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "offload_weights",
    "track_paused_request_events",
    "track_generated_token_events",
    "use_cuda_graphs_for_non_decode_steps",
    "cuda_graph_all_prefills",
    "batch_invariant",
    "materialize_only_last_token_logits",
    "static_kv_memory_pointers",
)


def _member(kind: type[_Enum], config: InferenceConfig, name: str) -> _Enum:
    """A field's value, or its name, as a member of the enumeration."""
    value = getattr(config, name)
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise ConfigurationError(f"{name}={value!r} is unknown; choose one of {known}", field=name) from None
