"""The size of a context, from the configuration and the model."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from megatron_runtime.config import (
    CPU_TOKENS_PER_PASS,
    CUDA_TOKENS_PER_PASS,
    DEFAULT_MAX_REQUESTS,
    PROMPT_LOGIT_BYTES,
    PROMPT_LOGIT_BYTES_ON_GPU,
    InferenceConfig,
    KVCacheManagementMode,
)
from megatron_runtime.engine.scheduling.schedule import SchedulerLimits
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.attention_kind import attention_kind
from megatron_runtime.model.cache_layout import PoolShares, StateMemory
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.device_memory import address_obstacle
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.recurrent_config import NO_DRAFTS

_logger = logging.getLogger(__name__)

_SHARED_ROWS_ON_CPU = 32
"""A decode pass of so many rows takes about twice as long as one of a single row: measured 1.7 to 2.2 times."""


@dataclass(frozen=True)
class ContextLimits:
    """Sizes that are equal on all ranks of a replica group."""

    num_blocks: int
    block_size_tokens: int
    max_requests: int
    max_tokens: int
    max_sequence_length: int
    prompt_logits: int
    """See `SchedulerLimits`."""
    paused_blocks: int = 0
    """Most blocks of requests that wait for further blocks."""
    num_snapshots: int = 0
    """Most snapshots of recurrent states in the prefix cache."""
    shared_rows: int | None = None
    """See `SchedulerLimits`; None on a GPU, where a decode pass takes hardly longer with more rows."""

    @property
    def max_blocks_per_sequence(self) -> int:
        """Number of blocks of the longest sequence."""
        return -(-self.max_sequence_length // self.block_size_tokens)

    @classmethod
    def derive(
        cls, model_config: ModelConfig, config: InferenceConfig, *, dtype: torch.dtype, device_type: str
    ) -> ContextLimits:
        """The limits for a configuration. The pool is not larger than all requests together can fill.

        Raises:
            ConfigurationError: The pool has no room for a single block, or the settings for recurrent states don't fit.
        """
        max_sequence_length = _sequence_length(model_config, config)
        blocks_each = -(-max_sequence_length // config.block_size_tokens)
        wanted = config.max_requests or min(DEFAULT_MAX_REQUESTS, config.max_tokens or DEFAULT_MAX_REQUESTS)
        least_blocks = 1 if config.max_sequence_length is None else blocks_each
        shares = _divide_pool(model_config, config, dtype, device_type, wanted, least_blocks)
        max_requests = shares.sequences
        if max_requests < wanted:
            _logger.info("max_requests=%d: the pool has room for the states of %d requests", wanted, max_requests)
        num_blocks = min(shares.blocks, max_requests * blocks_each)
        return cls(
            num_blocks=num_blocks,
            block_size_tokens=config.block_size_tokens,
            max_requests=min(max_requests, num_blocks),
            max_tokens=_tokens_per_pass(config, max_requests, max_sequence_length, device_type),
            max_sequence_length=max_sequence_length,
            prompt_logits=_prompt_logits(model_config.vocab_size, device_type),
            paused_blocks=int((config.paused_buffer_size_gb or 0) * 2**30) // block_bytes(model_config, config, dtype),
            num_snapshots=min(shares.snapshots, num_blocks),
            shared_rows=_SHARED_ROWS_ON_CPU if device_type == "cpu" else None,
        )

    def of_passes(self, *, chunked_prefill: bool, passes_in_flight: int, shares_times: bool) -> SchedulerLimits:
        """The limits of the passes of a scheduler."""
        return SchedulerLimits(
            max_requests=self.max_requests,
            max_tokens=self.max_tokens,
            block_size_tokens=self.block_size_tokens,
            chunked_prefill=chunked_prefill,
            paused_blocks=self.paused_blocks,
            passes_in_flight=passes_in_flight,
            shares_times=shares_times,
            shared_rows=self.shared_rows,
            prompt_logits=self.prompt_logits,
        )

    def allocate(
        self, model_config: ModelConfig, dtype: torch.dtype, device: torch.device, *, keeps_addresses: bool = False
    ) -> KVCache:
        """A KV cache with these limits; ``keeps_addresses`` as for it.

        Raises:
            ConfigurationError: The device has too little memory.
        """
        try:
            return KVCache(
                model_config,
                self.num_blocks,
                self.block_size_tokens,
                dtype,
                device,
                num_states=self.max_requests,
                num_snapshots=self.num_snapshots,
                keeps_addresses=keeps_addresses,
            )
        except (RuntimeError, MemoryError) as error:
            size = self.num_blocks * KVCache.block_bytes(model_config, self.block_size_tokens, dtype)
            size += (self.max_requests + self.num_snapshots) * attention_kind(model_config).cache_layout.state_bytes
            raise ConfigurationError(
                f"the KV cache of {size} bytes can't be allocated on {device} ({error}); "
                "lower kv_cache_memory_bytes, max_requests or max_sequence_length",
                field="kv_cache_memory_bytes",
            ) from error


def check_drafts(model_config: ModelConfig, config: InferenceConfig) -> None:
    """Raise ConfigurationError: recurrent states can't return to the token before a wrong draft."""
    if model_config.recurrent is not None and config.num_speculative_tokens:
        raise ConfigurationError(
            f"num_speculative_tokens={config.num_speculative_tokens}: {model_config.architecture} {NO_DRAFTS}; set 0",
            field="num_speculative_tokens",
        )


def keeps_addresses(config: InferenceConfig, device: torch.device) -> bool:
    """Whether a suspension releases the KV cache without its addresses.

    Raises:
        ConfigurationError: It releases the cache, and the configuration requires its addresses, but can't have them.
    """
    mode = config.kv_cache_management_mode
    if mode is KVCacheManagementMode.PERSIST:
        return False
    obstacle = address_obstacle(device)
    if obstacle is not None and config.static_kv_memory_pointers:
        raise ConfigurationError(
            f"static_kv_memory_pointers=True: on suspend, kv_cache_management_mode={mode.value!r} releases the memory "
            f"of the KV cache, whose address then changes, because {obstacle}; 'persist' keeps it",
            field="static_kv_memory_pointers",
        )
    return obstacle is None


def config_within(limits: ContextLimits, model_config: ModelConfig, config: InferenceConfig) -> InferenceConfig:
    """The configuration, without a prefix cache if the pool has no room for a snapshot of recurrent states."""
    if model_config.recurrent is None or limits.num_snapshots or not config.enable_prefix_caching:
        return config
    if config.prefix_caching_mamba_gb is not None:
        _logger.info("enable_prefix_caching=False: prefix_caching_mamba_gb=%s", config.prefix_caching_mamba_gb)
        return replace(config, enable_prefix_caching=False)
    _logger.info(
        "enable_prefix_caching=False: the pool has no room for a copy of recurrent states, %d bytes, for the prefix "
        "cache; raise %s%s",
        model_config.recurrent.state_bytes,
        _size_field(config),
        "" if config.max_requests is None else f" or lower max_requests={config.max_requests}",
    )
    return replace(config, enable_prefix_caching=False)


def block_bytes(model_config: ModelConfig, config: InferenceConfig, dtype: torch.dtype) -> int:
    """Bytes of one block of this rank, with those of the draft model's keys and values in the same block.

    Raises:
        ConfigurationError: ``speculative_draft_model`` is no model from `load_model`.
    """
    own, draft = KVCache.block_bytes(model_config, config.block_size_tokens, dtype), config.speculative_draft_model
    if draft is None:
        return own
    if not isinstance(draft, Decoder):
        raise ConfigurationError(
            f"speculative_draft_model is a {type(draft).__name__}; give the result of load_model",
            field="speculative_draft_model",
        )
    return own + KVCache.block_bytes(draft.shard.cache_config, config.block_size_tokens, draft.dtype)


def _sequence_length(model_config: ModelConfig, config: InferenceConfig) -> int:
    longest = model_config.max_position_embeddings
    if config.max_sequence_length is None:
        return longest
    if config.max_sequence_length > longest:
        _logger.info("max_sequence_length=%d: the model takes %d tokens", config.max_sequence_length, longest)
    return min(config.max_sequence_length, longest)


def _divide_pool(
    model_config: ModelConfig,
    config: InferenceConfig,
    dtype: torch.dtype,
    device_type: str,
    max_requests: int,
    least_blocks: int,
) -> PoolShares:
    """What the pool has room for."""
    layout, each = attention_kind(model_config).cache_layout, block_bytes(model_config, config, dtype)
    memory = StateMemory(
        config.mamba_memory_ratio, config.prefix_caching_mamba_gb if config.enable_prefix_caching else None
    )
    available = config.pool_bytes(device_type)
    if layout.state_bytes and config.kv_cache_memory_bytes is None:
        available += memory.snapshot_bytes  # as in Megatron
    if available < layout.smallest_pool(each):
        field = _size_field(config)
        states = f" and the recurrent states of one request, {layout.state_bytes} bytes" if layout.state_bytes else ""
        raise ConfigurationError(
            f"{field}={getattr(config, field)} is less than one KV block of {each} bytes "
            f"({config.block_size_tokens} tokens){states}; raise it or lower block_size_tokens",
            field=field,
        )
    layout.check(available, each, memory, model_config.architecture)
    return layout.divide(
        available,
        each,
        max_requests,
        is_chosen=config.max_requests is not None,
        has_snapshots=config.enable_prefix_caching,
        least_blocks=least_blocks,
        memory=memory,
    )


def _size_field(config: InferenceConfig) -> str:
    """The field that gives the size of the pool."""
    return "buffer_size_gb" if config.kv_cache_memory_bytes is None else "kv_cache_memory_bytes"


def _tokens_per_pass(config: InferenceConfig, max_requests: int, max_sequence_length: int, device_type: str) -> int:
    if config.max_tokens is not None:
        return config.max_tokens
    usual = CPU_TOKENS_PER_PASS if device_type == "cpu" else CUDA_TOKENS_PER_PASS
    return max(usual, max_requests, 0 if config.enable_chunked_prefill else max_sequence_length)


def _prompt_logits(vocab_size: int, device_type: str) -> int:
    """Most tokens of prompts whose log probabilities a pass computes, besides one of each request."""
    most_bytes = PROMPT_LOGIT_BYTES if device_type == "cpu" else PROMPT_LOGIT_BYTES_ON_GPU
    return max(most_bytes // (torch.float32.itemsize * max(vocab_size, 1)), 1)
