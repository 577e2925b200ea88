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

    widths = cache.layout.widths
    return can_attend(len(widths), widths[0], cache.dtype)


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
        """As in AttentionPlan, for a cache of keys and values."""
        from megatron_runtime.gpu.attention import attend

        assert value_width is None, "latents have a cache of one array"
        return attend(heads, rotation, cache, self._batch, window, soft_cap, sinks, is_chunked)
