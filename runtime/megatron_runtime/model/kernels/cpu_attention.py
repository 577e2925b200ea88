"""Attention of a flat batch on a CPU: compiled kernels, on the threads of PyTorch."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.model.cache_layout import CacheLayout
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.kernels import latent_products
from megatron_runtime.model.kernels.attention_kernels import attention_kernel
from megatron_runtime.model.kernels.compiled import KINDS, address, as_array, even_shares
from megatron_runtime.model.kernels.recording import active_recording
from megatron_runtime.model.kernels.threads import kernel_threads
from megatron_runtime.model.kv_cache import LayerCache
from megatron_runtime.model.rotary import Rotation

TILE = 16
"""Queries that use a chunk of keys while it is in the processor's cache."""

HEADS_TOGETHER = 16
"""Maximum of query heads of a key head that one thread processes together; more are divided into groups."""
UNLIMITED = 1 << 40
Array = NDArray[Any]
NO_SINKS = np.empty(0, np.float32)


class AttentionInputs(NamedTuple):
    """Where a recorded call has those of its batch from."""

    layer: int
    """With the rotation."""
    window: int | None
    groups: int
    dtype: torch.dtype


class CpuAttention:
    """The rows of one batch in tiles of consecutive rows, in equal shares for the threads."""

    def __init__(self, batch: ForwardBatch) -> None:
        self._slots = batch.slots.numpy()
        self._tables = batch.block_tables.numpy()
        starts, contexts = batch.query_starts.numpy(), batch.context_lengths.numpy()
        lengths = np.diff(starts)
        counts = -(-lengths // TILE)
        requests = np.repeat(np.arange(len(lengths)), counts)
        begins = (np.arange(len(requests)) - np.repeat(counts.cumsum() - counts, counts)) * TILE
        rows = np.minimum(TILE, lengths[requests] - begins)
        positions = (contexts - lengths)[requests] + begins
        self._tiles = np.stack((requests, starts[requests] + begins, positions, rows), axis=1).astype(np.int32)
        self._rows = even_shares(len(self._slots))
        self._pairs: dict[int | None, NDArray[np.int64]] = {}
        self._turns: dict[int, tuple[Rotation | None, tuple[Array, Array]]] = {}

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
        """As in AttentionPlan."""
        keys, values = cache[0], cache[-1]
        num_blocks, kv_heads, size, key_width = keys.shape
        rows, query_heads = heads.shape[0], heads.shape[1] - len(cache) * kv_heads
        groups = kv_heads * _parts(query_heads // kv_heads)
        seen = heads.new_empty(rows, query_heads, value_width or key_width)
        assert keys.dtype is heads.dtype
        inputs = self.inputs(rotation, window, groups, heads.dtype)
        if (recording := active_recording()) is not None:
            recording.name_inputs(inputs, AttentionInputs(recording.layer, window, groups, heads.dtype))
        *tables, cosines, sines = inputs
        reach = UNLIMITED if window is None else window
        chunked = reach if is_chunked and window is not None else 0
        scores = NO_SINKS if sinks is None else as_array(sinks)
        attend = attention_kernel(key_width, seen.shape[2], len(cache) == 1, heads.dtype is torch.bfloat16)
        places = address(heads), address(seen), query_heads, address(keys), address(values), num_blocks, kv_heads, size
        attend(*places, *tables, groups, cosines, sines, reach, chunked, scores, soft_cap or 0.0)
        return seen

    def inputs(
        self, rotation: Rotation | None, window: int | None, groups: int, dtype: torch.dtype
    ) -> tuple[Array, ...]:
        """What a kernel gets of the batch for a layer: slots, tables, tiles, rows, pairs, cosines and sines."""
        pairs, turns = self._pairs_of(window, groups), self._turns_of(rotation, dtype)
        return self._slots, self._tables, self._tiles, self._rows, pairs, *turns

    def _turns_of(self, rotation: Rotation | None, dtype: torch.dtype) -> tuple[Array, Array]:
        """Cosines and sines [T, rotated channels]; most layers have the same."""
        known = self._turns.get(id(rotation))
        if known is None:
            cosines, sines = rotation or (torch.empty(len(self._slots), 0, dtype=dtype),) * 2
            known = rotation, (as_array(cosines.flatten(1)), as_array(sines.flatten(1)))
            self._turns[id(rotation)] = known
        return known[1]

    def _pairs_of(self, window: int | None, groups: int) -> NDArray[np.int64]:
        """Start and end of each thread's share of the pairs of a tile and a group of heads, by their contexts."""
        known = self._pairs.get(window)
        if known is None:
            ends = self._tiles[:, 2] + self._tiles[:, 3]
            reach = ends if window is None else np.minimum(ends, window + TILE)
            done = np.repeat(self._tiles[:, 3] * reach.astype(np.int64), groups).cumsum()
            threads = kernel_threads()
            known = np.searchsorted(done, np.arange(threads + 1) * done[-1] // threads)
            known[-1] = len(done)
            self._pairs[window] = known
        return known


def prepare(layout: CacheLayout, dtype: torch.dtype) -> None:
    """Compile the kernels for a cache of ``layout`` now, so that the first request does not wait for it."""
    if dtype in KINDS:
        attention_kernel(layout.key_width, layout.value_width, layout.values_in_keys, dtype is torch.bfloat16)
    if layout.values_in_keys:
        latent_products.prepare(dtype)


@cache
def _parts(heads: int) -> int:
    """The smallest number of equal parts of ``heads`` with at most HEADS_TOGETHER each."""
    return next(parts for parts in range(-(-heads // HEADS_TOGETHER), heads + 1) if heads % parts == 0)
