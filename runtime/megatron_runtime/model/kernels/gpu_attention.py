"""Attention of a flat batch on a GPU, with the kernels of this project."""

from __future__ import annotations

from torch import Tensor

from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.kernels.triton_support import has_triton
from megatron_runtime.model.kv_cache import KVCache, LayerCache
from megatron_runtime.model.rotary import Rotation


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
        """As in AttentionPlan. With a cache of one array, the queries in ``heads`` are rotated in place."""
        if value_width is not None:
            from megatron_runtime.gpu.latent_attention import attend_latents

            assert sinks is None, "no model has sinks beside latents"
            assert not is_chunked, "no model has chunks of latents"
            return attend_latents(heads, rotation, cache[0], self._batch, value_width, window, soft_cap)
        from megatron_runtime.gpu.attention import attend

        return attend(heads, rotation, cache, self._batch, window, soft_cap, sinks, is_chunked)
