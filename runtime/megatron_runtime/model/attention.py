"""The interface of attention, and the selection of its implementation for a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.kernels.compiled import KINDS
from megatron_runtime.model.kernels.cpu_attention import CpuAttention
from megatron_runtime.model.kernels.flashinfer_backend import FlashInferAttention
from megatron_runtime.model.kernels.gpu_attention import GpuAttention, has_gpu_attention
from megatron_runtime.model.kernels.torch_attention import TorchAttention
from megatron_runtime.model.kv_cache import KVCache, LayerCache
from megatron_runtime.model.rotary import Rotation

if TYPE_CHECKING:
    from megatron_runtime.gpu.flashinfer_attention import FlashInfer


class AttentionPlan(Protocol):
    """The attention of one batch; created once per forward pass and used by every layer."""

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
        """Write the new keys and values into ``cache`` and return the attention output: [T, heads, value width].

        ``heads`` is [T, heads + 2 * kv heads, key width], contiguous: each token's queries, keys and values, before
        ``rotation`` is applied to queries and keys. A query attends to at most the last ``window`` tokens; scores are
        divided by the square root of the key width, and then limited smoothly to plus or minus ``soft_cap``.

        With ``is_chunked``, the positions are divided into chunks of ``window`` tokens, and a query attends to those of
        its own chunk. ``sinks``, float32 [heads], are scores that take part in the softmax of each query, beside those
        of the keys.

        A ``cache`` of one array holds keys whose last ``value_width`` channels are the values; then ``heads`` is [T,
        heads + kv heads, key width]. In a cache of two arrays, values are as wide as keys.
        """
        ...


def plan_attention(batch: ForwardBatch, cache: KVCache, flashinfer: FlashInfer | None = None) -> AttentionPlan:
    """The plan for a batch whose tables point into ``cache``; by FlashInfer, if that is chosen."""
    if flashinfer is not None:
        return FlashInferAttention(batch, cache, flashinfer)
    if cache.device.type == "cpu" and cache.dtype in KINDS:
        return CpuAttention(batch)
    if has_gpu_attention(cache):
        return GpuAttention(batch)
    return TorchAttention(batch, cache.block_size_tokens)
