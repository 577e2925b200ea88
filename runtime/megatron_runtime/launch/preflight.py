"""Whether the checkpoint can be served with these options in this memory, and with what sizes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_runtime.cpu_features import has_bfloat16
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.launch.inspection import CheckpointFacts
from megatron_runtime.launch.memory import AvailableMemory
from megatron_runtime.launch.options import EngineOptions, LaunchOptions
from megatron_runtime.launch.quantity import format_bytes

USUAL_KV_CACHE = 2**30
RANK_OVERHEAD = 300 * 2**20
"""What a rank needs besides weights and cache: the interpreter, torch, and the activations of a step."""
KV_SHARE = 0.5
"""Most of the memory beside the weights that a cache of unasked size takes."""


@dataclass(frozen=True)
class EnginePlan:
    """The sizes that the ranks are started with. ``kv_cache_bytes`` None: the rank measures its device's memory."""

    max_sequence_length: int
    kv_cache_bytes: int | None
    weight_bytes: int

    def total_bytes(self, ranks: int) -> int:
        """What all ranks of the pod need together, as far as it is known."""
        return ranks * (self.weight_bytes + (self.kv_cache_bytes or 0) + RANK_OVERHEAD)

    def describe(self) -> str:
        """One line for people."""
        cache = "what the device has left" if self.kv_cache_bytes is None else format_bytes(self.kv_cache_bytes)
        return f"weights {format_bytes(self.weight_bytes)}, KV cache {cache}, up to {self.max_sequence_length} tokens"


def plan_engine(options: LaunchOptions, facts: CheckpointFacts, available: AvailableMemory) -> EnginePlan:
    """Raises ConfigurationError naming the flag, its value and the mend."""
    engine = options.engine
    if engine.max_sequence_length is not None and engine.max_sequence_length > facts.longest:
        raise ConfigurationError(
            f"--max-sequence-length {engine.max_sequence_length}: the model was made for {facts.longest} tokens; "
            f"use {facts.longest} or less"
        )
    weights = _weight_bytes(engine, facts)
    wanted = engine.max_sequence_length or facts.longest
    if engine.device != "cpu":
        return EnginePlan(wanted, engine.kv_cache_bytes, weights)
    ranks = options.local_ranks
    cache = _cache_bytes(options, facts, weights, available.count // ranks)
    needed = EnginePlan(wanted, cache, weights).total_bytes(ranks)
    if needed > available.count:
        raise ConfigurationError(
            f"--kv-cache-memory {format_bytes(cache)}: with {format_bytes(weights)} of weights and "
            f"{format_bytes(RANK_OVERHEAD)} for the rest, {ranks} rank(s) need "
            f"{format_bytes(needed)}, but only {available} is available; "
            "ask for a smaller cache, a smaller --dtype or fewer replicas, or give the pod more memory"
        )
    return EnginePlan(_length(options, facts, cache, wanted), cache, weights)


def element_bytes(engine: EngineOptions) -> int:
    """Bytes per weight and per element of the cache."""
    if engine.dtype == "auto":
        return 2 if engine.device != "cpu" or has_bfloat16() else 4
    return 4 if engine.dtype == "float32" else 2


def _weight_bytes(engine: EngineOptions, facts: CheckpointFacts) -> int:
    """Of one rank: all ranks of a stage divide the experts, and the tensor parallel ones the dense layers."""
    dense = facts.parameters - facts.expert_parameters
    if engine.device == "cpu":
        dense += facts.tied_head_parameters
    size, dense_ranks = element_bytes(engine), engine.tensor_parallel * engine.pipeline_parallel
    return dense * size // dense_ranks + facts.expert_parameters * size // engine.ranks_per_replica_group


def _cache_bytes(options: LaunchOptions, facts: CheckpointFacts, weights: int, share: int) -> int:
    """The cache that was asked for, or a usual one that the rank's share of the memory can hold."""
    if options.engine.kv_cache_bytes is not None:
        return options.engine.kv_cache_bytes
    left = share - weights - RANK_OVERHEAD
    if left <= 0:
        raise ConfigurationError(
            f"{options.model.flag}: a rank needs {format_bytes(weights)} for the weights and "
            f"{format_bytes(RANK_OVERHEAD)} besides, but its share of the memory is {format_bytes(share)}; give the "
            "pod more memory, or use a smaller --dtype, fewer replicas or a smaller model"
        )
    return max(min(USUAL_KV_CACHE, int(left * KV_SHARE)), _block_bytes(options.engine, facts))


def _block_bytes(engine: EngineOptions, facts: CheckpointFacts) -> int:
    return facts.cache_layout.block_bytes(engine.block_size_tokens, element_bytes(engine))


def _length(options: LaunchOptions, facts: CheckpointFacts, cache: int, wanted: int) -> int:
    """The longest sequence: one must fit into the cache as a whole."""
    engine = options.engine
    block = _block_bytes(engine, facts)
    fitting = cache // block * engine.block_size_tokens
    if not fitting:
        raise ConfigurationError(
            f"--kv-cache-memory {format_bytes(cache)}: too small for a single block of {engine.block_size_tokens} "
            f"tokens; give at least {format_bytes(block)}"
        )
    if engine.max_sequence_length is not None and fitting < wanted:
        needed = (wanted + engine.block_size_tokens) * block // engine.block_size_tokens
        raise ConfigurationError(
            f"--max-sequence-length {wanted}: a KV cache of {format_bytes(cache)} holds {fitting} tokens; "
            f"use {fitting} or less, or --kv-cache-memory {format_bytes(needed)} or more"
        )
    return min(wanted, fitting)
