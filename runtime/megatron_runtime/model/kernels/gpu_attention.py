"""Attention of a flat batch on a GPU, with the kernels of this project."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.attention_kind import attention_kind
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.kernels.triton_support import has_triton
from megatron_runtime.model.kv_cache import FLOAT8, KVCache, LayerCache
from megatron_runtime.model.rotary import Rotation

if TYPE_CHECKING:
    from megatron_runtime.gpu.latent_attention import LatentMatrices


def has_gpu_attention(cache: KVCache) -> bool:
    """Whether the kernels support the device, the layout and the type of a cache."""
    if cache.device.type != "cuda" or not has_triton():
        return False
    from megatron_runtime.gpu.attention import can_attend
    from megatron_runtime.gpu.latent_attention import can_attend_latents

    layout = cache.layout
    if layout.values_in_keys:
        return layout.heads == 1 and can_attend_latents(layout.key_width, layout.value_width, cache.dtype)
    return can_attend(len(layout.widths), layout.key_width, cache.dtype)


def cache_dtype(choice: str, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of keys and values for ``choice``, one of KV_CACHE_DTYPES.

    Args:
        choice: The setting.
        config: Of the model.
        dtype: Of its weights.
        device: Which computes.

    Raises:
        ConfigurationError: fp8 is chosen, but model or device do not support it.
    """
    if choice == "auto":
        return dtype
    if obstacle := _obstacle_to_float8(config, device):
        raise ConfigurationError(f"kv_cache_dtype={choice!r}: {obstacle}; use 'auto'", field="kv_cache_dtype")
    return FLOAT8


def _obstacle_to_float8(config: ModelConfig, device: torch.device) -> str | None:
    layout = attention_kind(config).cache_layout
    if device.type == "cpu":
        return "CPUs have no kernels for keys and values in fp8"
    if layout.values_in_keys:
        return "the cache of multi-head latent attention is not supported in fp8"
    if config.recurrent is not None:
        return "models with recurrent layers are not supported with a cache in fp8"
    if not has_triton():
        return "PyTorch's attention, which is used without Triton and a C compiler, does not support fp8"
    from megatron_runtime.gpu.attention import can_attend
    from megatron_runtime.gpu.float8 import FIRST_NATIVE
    from megatron_runtime.gpu.launch import capability

    if not can_attend(len(layout.widths), layout.key_width, FLOAT8):
        return f"no kernel supports heads of {layout.key_width} channels"
    found = capability(torch.empty(0, device=device))
    if found < FIRST_NATIVE:
        return f"GPUs from compute capability 8.9 on have fp8, and this one has {found / 10}"
    return None


class GpuAttention:
    """The rows of one batch; neither its creation nor its use waits for the device or copies a table to it."""

    def __init__(self, batch: ForwardBatch) -> None:
        # Imported here, because Triton is not needed on other devices.
        from megatron_runtime.gpu.attention import PagedBatch

        self._batch = PagedBatch(batch.slots, batch.query_starts, batch.context_lengths, batch.block_tables)

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
        """As in AttentionPlan, with a cache of keys and values; `attend_latents` is for the others."""
        from megatron_runtime.gpu.attention import attend

        assert value_width is None, "the queries of latents come with their matrices"
        return attend(heads, rotation, cache, self._batch, window, soft_cap, sinks, is_chunked)

    def attend_latents(
        self,
        queries: Tensor,
        compressed: Tensor,
        matrices: LatentMatrices,
        rotation: Rotation | None,
        cache: LayerCache,
        window: int | None,
        soft_cap: float | None,
    ) -> Tensor:
        """As `gpu.latent_attention.attend_latents`, with the cache of a layer."""
        from megatron_runtime.gpu.latent_attention import attend_latents

        return attend_latents(queries, compressed, matrices, rotation, cache[0], self._batch, window, soft_cap)
