"""Checks that the checkpoint can be served with these options in this memory, and chooses the sizes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from megatron_runtime.config import (
    CPU_TOKENS_PER_PASS,
    CUDA_SHARE,
    CUDA_TOKENS_PER_PASS,
    DEFAULT_MAX_REQUESTS,
    KV_CACHE_DTYPES,
    PROMPT_LOGIT_BYTES,
    PROMPT_LOGIT_BYTES_ON_GPU,
    SAME_VOCABULARY,
)
from megatron_runtime.cpu_features import has_bfloat16
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.launch.inspection import CheckpointFacts
from megatron_runtime.launch.memory import AvailableMemory
from megatron_runtime.launch.options import DRAFT_MODEL_FLAG, EngineOptions, LaunchOptions
from megatron_runtime.launch.quantity import format_bytes
from megatron_runtime.model.activations import RECORDED_ROWS
from megatron_runtime.model.attention_kind import ATTENTION_BACKENDS
from megatron_runtime.model.recurrent_config import NO_DRAFTS

USUAL_KV_CACHE = 2**30
RANK_OVERHEAD = 400 * 2**20
"""Memory of a rank on a CPU before its first request, besides weights and KV cache: the interpreter and torch; and of
the coordinator, the servers and the fork servers of the pod."""
ACTIVATION_COPIES = 1.5
"""Activations of a pass on a CPU, as a multiple of those of its widest layer: kernels also pack their inputs."""
CUDA_CONTEXT = 2**30
"""Memory of a GPU for the context of CUDA, the workspaces of its libraries, and communication."""
LOGIT_COPIES = 4
"""Copies of the float32 logits while a pass samples: logits, edited logits, log probabilities, a temporary one."""
KV_SHARE = 0.5
"""Maximum fraction of the memory besides the weights for a KV cache without a configured size."""


@dataclass(frozen=True)
class EnginePlan:
    """The sizes for the ranks. ``kv_cache_bytes`` None: the rank measures the memory of its GPU."""

    max_sequence_length: int
    kv_cache_bytes: int | None
    weight_bytes: int
    reserve_bytes: int
    """Memory of a rank besides weights and KV cache."""
    device: AvailableMemory | None = None
    """The GPU of a rank, if its size is known."""

    def total_bytes(self, ranks: int) -> int:
        """Memory of all ranks of the pod, as far as it is known."""
        return ranks * (self.weight_bytes + (self.kv_cache_bytes or 0) + self.reserve_bytes)

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"weights {format_bytes(self.weight_bytes)}, KV cache {self._cache()}, "
            f"reserve {format_bytes(self.reserve_bytes)}, up to {self.max_sequence_length} tokens"
        )

    def _cache(self) -> str:
        if self.kv_cache_bytes is not None:
            return format_bytes(self.kv_cache_bytes)
        share = f"{CUDA_SHARE} of the rest of the GPU's memory"
        if self.device is None:
            return f"{share}, whose size is unknown"
        rest = self.device.count - self.weight_bytes - self.reserve_bytes
        return f"about {format_bytes(int(CUDA_SHARE * rest))} ({share}, {self.device})"


def plan_engine(
    options: LaunchOptions,
    facts: CheckpointFacts,
    available: AvailableMemory,
    device: AvailableMemory | None = None,
) -> EnginePlan:
    """The sizes that fit into ``available`` memory of the host, or on a ``device`` of this size, None if unknown.

    Raises ConfigurationError that names the flag, its value and a fix.
    """
    plan = _plan(options, facts, available, device)
    _check_draft_model(options, facts, plan.max_sequence_length)
    return plan


def _plan(
    options: LaunchOptions, facts: CheckpointFacts, available: AvailableMemory, device: AvailableMemory | None
) -> EnginePlan:
    engine = options.engine
    if engine.max_sequence_length is not None and engine.max_sequence_length > facts.longest:
        raise ConfigurationError(
            f"--max-sequence-length {engine.max_sequence_length}: the model supports {facts.longest} tokens; "
            f"use {facts.longest} or less"
        )
    if facts.cache_layout.state_bytes and engine.num_speculative_tokens:
        raise ConfigurationError(
            f"--num-speculative-tokens {engine.num_speculative_tokens}: {facts.architecture} {NO_DRAFTS}; use 0, "
            "or omit it"
        )
    _check_cache_dtype(engine, facts)
    _check_attention_backend(engine, facts)
    weights = _weight_bytes(engine, facts)
    length = engine.max_sequence_length or facts.longest
    if engine.device != "cpu":
        reserve = _reserve_on_device(engine, facts)
        return _plan_on_device(options, facts, EnginePlan(length, engine.kv_cache_bytes, weights, reserve, device))
    ranks, reserve = options.local_ranks, _reserve_on_cpu(engine, facts)
    cache = _cache_bytes(options, facts, weights + reserve, available.count // ranks)
    plan = EnginePlan(length, cache, weights, reserve)
    if (needed := plan.total_bytes(ranks)) > available.count:
        raise ConfigurationError(
            f"--kv-cache-memory {format_bytes(cache)}: with {format_bytes(weights)} of weights and about "
            f"{format_bytes(reserve)} for processes and passes, {ranks} rank(s) need {format_bytes(needed)}, but only "
            f"{available} is available; use a smaller cache, a smaller --dtype, a lower --max-requests or fewer "
            "replica groups, or give the pod more memory"
        )
    return replace(plan, max_sequence_length=_length(options, facts, cache, length))


def _check_cache_dtype(engine: EngineOptions, facts: CheckpointFacts) -> None:
    """A rank also checks its GPU."""
    obstacle = None
    if engine.kv_cache_dtype == "auto":
        return
    if engine.kv_cache_dtype not in KV_CACHE_DTYPES:
        listed = ", ".join(KV_CACHE_DTYPES)
        raise ConfigurationError(f"--kv-cache-dtype {engine.kv_cache_dtype}: use one of {listed}")
    if engine.device == "cpu":
        obstacle = "the device is cpu, which has no kernels for keys and values in fp8"
    elif facts.cache_layout.values_in_keys or facts.cache_layout.state_bytes:
        kind = "recurrent layers" if facts.cache_layout.state_bytes else "multi-head latent attention"
        obstacle = f"{facts.architecture} has {kind}, whose cache is not supported in fp8"
    if obstacle is not None:
        raise ConfigurationError(f"--kv-cache-dtype {engine.kv_cache_dtype}: {obstacle}; use auto")


def _check_attention_backend(engine: EngineOptions, facts: CheckpointFacts) -> None:
    """A rank also checks the heads of the model, and that the package is installed."""
    choice, obstacle = engine.attention_backend, None
    if choice == "auto":
        return
    if choice not in ATTENTION_BACKENDS:
        raise ConfigurationError(f"--attention-backend {choice}: use one of {', '.join(ATTENTION_BACKENDS)}")
    if engine.device == "cpu":
        obstacle = "it computes on GPUs, and the device is cpu"
    elif facts.cache_layout.values_in_keys:
        obstacle = f"{facts.architecture} has multi-head latent attention, which is not supported with it"
    elif engine.dtype == "float32":
        obstacle = "it computes in float16 and bfloat16, not with --dtype float32"
    elif engine.kv_cache_dtype != "auto":
        obstacle = f"--kv-cache-dtype {engine.kv_cache_dtype} is not supported with it"
    elif engine.batch_invariant:
        obstacle = "its results depend on the batch, so --batch-invariant is not possible"
    if obstacle is not None:
        raise ConfigurationError(f"--attention-backend {choice}: {obstacle}; use auto")


def _check_draft_model(options: LaunchOptions, facts: CheckpointFacts, length: int) -> None:
    draft = facts.draft
    if draft is None:
        return
    flag = f"{DRAFT_MODEL_FLAG} {options.engine.speculative_draft_model}"
    if draft.cache_layout.state_bytes:
        raise ConfigurationError(f"{flag}: it {NO_DRAFTS}; use a draft model with attention alone")
    if draft.vocabulary != facts.vocabulary:
        raise ConfigurationError(
            f"{flag}: its vocabulary has {draft.vocabulary} tokens, but that of the served model {facts.vocabulary}; "
            f"{SAME_VOCABULARY}"
        )
    if draft.longest < length:
        raise ConfigurationError(
            f"{flag}: it takes {draft.longest} tokens, but a sequence may have {length}; use --max-sequence-length "
            f"{draft.longest} or less, or another draft model"
        )


def _plan_on_device(options: LaunchOptions, facts: CheckpointFacts, plan: EnginePlan) -> EnginePlan:
    """The plan, checked against the memory of a GPU if that is known."""
    cache, device = plan.kv_cache_bytes, plan.device
    parts = f"{format_bytes(plan.weight_bytes)} for the weights and about {format_bytes(plan.reserve_bytes)} for a pass"
    if device is not None and plan.total_bytes(1) - (cache or 0) >= device.count:
        raise ConfigurationError(
            f"{options.model.flag}: a rank needs {parts}, but its GPU has {device}; use a smaller --dtype, more ranks "
            "with --tensor-parallel or --pipeline-parallel, a lower --max-requests, or a GPU with more memory"
        )
    if cache is None:  # which the rank measures; settings that fit no size are refused here, by the names of flags
        block = _block_bytes(options.engine, facts)
        facts.cache_layout.check(sys.maxsize, block, options.engine.state_memory, facts.architecture)
        return plan
    if device is not None and plan.total_bytes(1) > device.count:
        fitting = max(device.count - plan.total_bytes(1) + cache, 0) // 2**27 * 2**27
        raise ConfigurationError(
            f"--kv-cache-memory {format_bytes(cache)}: with {parts}, a rank needs {format_bytes(plan.total_bytes(1))}, "
            f"but its GPU has {device}; use {format_bytes(fitting)} or less, or omit the size, so that the ranks "
            "measure it"
        )
    return replace(plan, max_sequence_length=_length(options, facts, cache, plan.max_sequence_length))


def _reserve_on_device(engine: EngineOptions, facts: CheckpointFacts) -> int:
    """An estimate for the check before the start; a rank that chooses the size of its KV cache measures it."""
    activations = CUDA_TOKENS_PER_PASS * facts.activation_elements * element_bytes(engine)
    return CUDA_CONTEXT + activations + _logit_bytes(engine, facts, CUDA_TOKENS_PER_PASS, PROMPT_LOGIT_BYTES_ON_GPU)


def _reserve_on_cpu(engine: EngineOptions, facts: CheckpointFacts) -> int:
    """An estimate of the memory of the largest passes: activations, in float32 at most, the recordings of small passes,
    and logits."""
    rows = CPU_TOKENS_PER_PASS + RECORDED_ROWS
    activations = int(ACTIVATION_COPIES * rows * facts.activation_elements * 4)
    most_tokens = max(CPU_TOKENS_PER_PASS, _most_requests(engine))
    return RANK_OVERHEAD + activations + _logit_bytes(engine, facts, most_tokens, PROMPT_LOGIT_BYTES)


def _logit_bytes(engine: EngineOptions, facts: CheckpointFacts, most_tokens: int, of_prompts: int) -> int:
    """Of a pass of at most ``most_tokens``, with ``of_prompts`` bytes of the logits of prompts."""
    rows = _most_requests(engine) * (1 + engine.num_speculative_tokens)
    row_bytes = 4 * facts.vocabulary
    return LOGIT_COPIES * min(rows * row_bytes + of_prompts, most_tokens * row_bytes)


def _most_requests(engine: EngineOptions) -> int:
    return engine.max_requests or DEFAULT_MAX_REQUESTS


def element_bytes(engine: EngineOptions) -> int:
    """Bytes per weight, and per element of the cache unless that has a type of its own."""
    if engine.dtype == "auto":
        return 2 if engine.device != "cpu" or has_bfloat16() else 4
    return 4 if engine.dtype == "float32" else 2


def _weight_bytes(engine: EngineOptions, facts: CheckpointFacts) -> int:
    """Of one rank, with the draft model: all ranks of a stage divide the experts, and the tensor parallel ones the
    dense layers."""
    kept, size = facts.kept, element_bytes(engine)
    experts = (facts.expert_parameters - kept.expert_parameters) * size + kept.expert_bytes
    weights = (facts.parameters - kept.parameters) * size + kept.num_bytes
    if engine.device == "cpu":
        weights += facts.tied_head_parameters * size
    dense_ranks = engine.tensor_parallel * engine.pipeline_parallel
    draft = 0 if facts.draft is None else _weight_bytes(engine.of_draft_model, facts.draft)
    return draft + (weights - experts) // dense_ranks + experts // engine.ranks_per_replica_group


def _cache_bytes(options: LaunchOptions, facts: CheckpointFacts, beside: int, share: int) -> int:
    """The configured size of the KV cache, or a default size that fits the rank's share of the memory ``beside`` its
    weights and its reserve."""
    if options.engine.kv_cache_bytes is not None:
        return options.engine.kv_cache_bytes
    left = share - beside
    if left <= 0:
        raise ConfigurationError(
            f"{options.model.flag}: a rank needs about {format_bytes(beside)} for the weights, its processes and its "
            f"passes, but its share of the memory is {format_bytes(share)}; give the pod more memory, or use a smaller "
            "--dtype, a lower --max-requests, fewer replica groups or a smaller model"
        )
    smallest = facts.cache_layout.smallest_pool(_block_bytes(options.engine, facts))
    return max(min(USUAL_KV_CACHE, int(left * KV_SHARE)), smallest)


def _block_bytes(engine: EngineOptions, facts: CheckpointFacts) -> int:
    """Of one rank; the keys and values of the draft model are in the same blocks."""
    draft = 0 if facts.draft is None else _block_bytes(engine.of_draft_model, facts.draft)
    size = element_bytes(engine) if engine.kv_cache_dtype == "auto" else 1
    return draft + facts.cache_layout.block_bytes(engine.block_size_tokens, size)


def _length(options: LaunchOptions, facts: CheckpointFacts, cache: int, length: int) -> int:
    """The longest sequence that fits the cache, at most ``length``."""
    engine = options.engine
    block, layout = _block_bytes(engine, facts), facts.cache_layout
    smallest = layout.smallest_pool(block)
    if cache < smallest:
        states = f" and {format_bytes(layout.state_bytes)} of recurrent states" if layout.state_bytes else ""
        raise ConfigurationError(
            f"--kv-cache-memory {format_bytes(cache)}: too small for a single block of {engine.block_size_tokens} "
            f"tokens{states}; give at least {format_bytes(smallest)}"
        )
    requests, memory = _most_requests(engine), engine.state_memory
    layout.check(cache, block, memory, facts.architecture)
    shares = layout.divide(
        cache,
        block,
        requests,
        is_chosen=engine.max_requests is not None,
        has_snapshots=engine.prefix_caching,
        least_blocks=1 if engine.max_sequence_length is None else -(-length // engine.block_size_tokens),
        memory=memory,
    )
    fitting = shares.blocks * engine.block_size_tokens
    if engine.max_sequence_length is not None and fitting < length:
        needed = (length + engine.block_size_tokens) * block // engine.block_size_tokens
        of_states = requests * layout.state_bytes
        if engine.max_requests is None and memory.ratio is None:
            of_states = min(of_states, max(needed, layout.state_bytes))
        needed += of_states + (memory.snapshot_bytes if layout.state_bytes else 0)
        raise ConfigurationError(
            f"--max-sequence-length {length}: a KV cache of {format_bytes(cache)} holds {fitting} tokens; "
            f"use {fitting} or less, or --kv-cache-memory {format_bytes(needed)} or more"
        )
    return min(length, fitting)
