"""Settings of the engine, and the enumerations that they use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatron_runtime.errors import ConfigurationError

LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")


class KVCacheManagementMode(StrEnum):
    """What becomes of the KV cache while the engine is suspended."""

    PERSIST = "persist"
    """It stays where it is."""
    OFFLOAD = "offload"
    """It is copied to host memory, and back on resume."""
    RECOMPUTE = "recompute"
    """It is dropped; unfinished requests are computed again from their tokens on resume."""


class PrefixCachingCoordinatorPolicy(StrEnum):
    """How the coordinator picks a replica for a request."""

    ROUND_ROBIN = "round_robin"
    LOAD_BALANCED = "load_balanced"
    FIRST_PREFIX_BLOCK = "first_prefix_block"
    LONGEST_PREFIX = "longest_prefix"


@dataclass
class InferenceConfig:
    """How one engine uses its memory and its turns.

    Raises:
        ConfigurationError: A value that can't work, naming field, value and mend.
    """

    block_size_tokens: int = 16
    """Tokens per KV block."""
    buffer_size_gb: float | None = None
    """Size of the KV pool in GiB; None takes 20 on a GPU and 2 on a CPU, whose memory others share."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV pool in bytes; wins over ``buffer_size_gb``."""
    max_requests: int | None = None
    """Most requests in one forward pass; None takes 256, or fewer if the pool has fewer blocks."""
    max_tokens: int | None = None
    """Most tokens in one forward pass; None takes 16384 on a GPU and 1024 on a CPU."""
    max_sequence_length: int | None = 2560
    """Most tokens of a prompt and its answer together; None, and anything longer, means what the model was made for."""
    enable_chunked_prefill: bool = True
    """Lets a prompt longer than what is left of ``max_tokens`` be computed over several forward passes."""
    kv_cache_management_mode: KVCacheManagementMode = KVCacheManagementMode.PERSIST
    """What becomes of the KV cache on suspend."""
    offload_weights: bool = False
    """Moves the weights to host memory too while the engine is suspended."""
    track_generated_token_events: bool = False
    """Records an event per generated token in every request."""
    request_timeout: float | None = None
    """Seconds after its submission at which an unfinished request fails; None means never."""
    logprobs_mode: str = "raw_logprobs"
    """"raw_logprobs" reports the model's own log probabilities; "processed_logprobs" those that generated tokens were
    drawn with, after penalties, biases, temperature and filters. The prompt's tokens were not drawn: theirs are raw."""

    def __post_init__(self) -> None:
        self._accept_mode_by_name()
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise ConfigurationError(
                f"logprobs_mode={self.logprobs_mode!r} is unknown; choose one of {', '.join(LOGPROBS_MODES)}",
                field="logprobs_mode",
            )
        self._require_whole("block_size_tokens")
        for name in ("kv_cache_memory_bytes", "max_requests", "max_tokens", "max_sequence_length"):
            if getattr(self, name) is not None:
                self._require_whole(name)
        for name in ("buffer_size_gb", "request_timeout"):
            if getattr(self, name) is not None:
                self._require_positive(name)
        if self.max_tokens is not None and self.max_requests is not None and self.max_tokens < self.max_requests:
            raise ConfigurationError(
                f"max_tokens={self.max_tokens} is less than max_requests={self.max_requests}: a forward pass carries "
                "at least one token per request, so raise max_tokens or lower max_requests",
                field="max_tokens",
            )

    def pool_bytes(self, device_type: str) -> int:
        """Bytes that the KV pool may take on a device of this type ("cpu", "cuda")."""
        if self.kv_cache_memory_bytes is not None:
            return self.kv_cache_memory_bytes
        if self.buffer_size_gb is not None:
            return int(self.buffer_size_gb * 2**30)
        return (2 if device_type == "cpu" else 20) * 2**30

    def _accept_mode_by_name(self) -> None:
        try:
            self.kv_cache_management_mode = KVCacheManagementMode(self.kv_cache_management_mode)
        except ValueError:
            known = ", ".join(mode.value for mode in KVCacheManagementMode)
            raise ConfigurationError(
                f"kv_cache_management_mode={self.kv_cache_management_mode!r} is unknown; choose one of {known}",
                field="kv_cache_management_mode",
            ) from None

    def _require_whole(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigurationError(f"{name}={value!r} must be a whole number of at least 1", field=name)

    def _require_positive(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise ConfigurationError(f"{name}={value!r} must be a number greater than 0", field=name)
