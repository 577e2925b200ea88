"""The choice of FlashInfer for the attention of a model on a GPU, and its use as an AttentionPlan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.attention_kind import ATTENTION_BACKENDS, attention_kind
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.kernels.triton_support import has_triton
from megatron_runtime.model.kv_cache import KVCache, LayerCache
from megatron_runtime.model.rotary import Rotation

if TYPE_CHECKING:
    from megatron_runtime.gpu.flashinfer_attention import FlashInfer


def choose_backend(
    choice: str, config: ModelConfig, dtype: torch.dtype, device: torch.device, kv_cache_dtype: str
) -> FlashInfer | None:
    """FlashInfer, or None for the attention that is chosen by the device.

    Args:
        choice: One of ATTENTION_BACKENDS.
        config: Of the model.
        dtype: Of its weights.
        device: Which computes.
        kv_cache_dtype: The setting for keys and values.

    Raises:
        ConfigurationError: It is unknown, or the model, the device or this environment does not support it.
    """
    if choice == "auto":
        return None
    if choice not in ATTENTION_BACKENDS:
        listed = ", ".join(ATTENTION_BACKENDS)
        raise ConfigurationError(f"attention_backend={choice!r}: use one of {listed}", field="attention_backend")
    if obstacle := _obstacle(config, dtype, device, kv_cache_dtype):
        raise ConfigurationError(f"attention_backend={choice!r}: {obstacle}; use 'auto'", field="attention_backend")
    from megatron_runtime.gpu.flashinfer_attention import PACKAGE, FlashInfer

    try:
        return FlashInfer(device)
    except ImportError as error:
        raise ConfigurationError(
            f"attention_backend={choice!r}: the package {PACKAGE} can't be imported ({error}); install it with pip "
            f"install {PACKAGE}, or use 'auto'",
            field="attention_backend",
        ) from error


def _obstacle(config: ModelConfig, dtype: torch.dtype, device: torch.device, kv_cache_dtype: str) -> str | None:
    layout = attention_kind(config).cache_layout
    if device.type != "cuda":
        return f"FlashInfer computes on GPUs, and the device is {device.type}"
    if layout.values_in_keys:
        return "multi-head latent attention is not supported with FlashInfer"
    if config.attention_sinks:
        return "attention sinks are not supported with FlashInfer"
    if config.chunked_windows:
        return "attention in chunks is not supported with FlashInfer"
    if kv_cache_dtype != "auto":
        return "a cache in fp8 is not supported with FlashInfer"
    if not has_triton():
        return "it needs Triton and a C compiler beside FlashInfer"
    from megatron_runtime.gpu.flashinfer_attention import DTYPES, WIDTHS

    if dtype not in DTYPES:
        return f"FlashInfer computes in float16 and bfloat16, and the dtype is {dtype}"
    if layout.key_width not in WIDTHS:
        return f"FlashInfer has kernels for heads of {', '.join(map(str, WIDTHS))} channels, not of {layout.key_width}"
    return None


class FlashInferAttention:
    """The rows of one batch. Waits for the device if the batch has no tables on the host."""

    def __init__(self, batch: ForwardBatch, cache: KVCache, flashinfer: FlashInfer) -> None:
        from megatron_runtime.gpu.attention import PagedBatch
        from megatron_runtime.gpu.flashinfer_attention import FlashInferPass, PassTables

        there = PagedBatch(batch.slots, batch.query_starts, batch.context_lengths, batch.block_tables)
        tables = there.query_starts, there.context_lengths, there.block_tables
        starts, contexts, blocks = map(torch.from_numpy, batch.host_tables or [each.cpu().numpy() for each in tables])
        page = cache.block_size_tokens
        self._pass = FlashInferPass(flashinfer, there, PassTables.of(starts, contexts, blocks, page))

    def attend(
        self,
        heads: Tensor,
        rotation: Rotation | None,
        cache: LayerCache,
        window: int | None,
        soft_cap: float | None = None,
        value_width: int | None = None,
        sinks: Tensor | None = None,
        is_chunked: bool = False,
    ) -> Tensor:
        """As in AttentionPlan, for models that `choose_backend` accepts."""
        assert value_width is None, "the cache has keys and values"
        assert sinks is None, "the model has no sinks"
        assert not is_chunked, "the model has no chunks"
        return self._pass.attend(heads, rotation, cache, window, soft_cap)
