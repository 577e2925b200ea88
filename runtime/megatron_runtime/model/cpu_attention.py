"""Attention of a flat batch on a CPU: our own kernels, on the threads that PyTorch may use."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.model.attention_kernels import attention_kernel, store_kernel
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.kv_cache import LayerCache
from megatron_runtime.model.threads import kernel_threads

TILE = 16
"""Queries that meet a stretch of keys while it is near to the processor."""

UNLIMITED = 1 << 40

KINDS = frozenset({torch.float32, torch.bfloat16})
"""The types of keys and values that there are kernels for."""


class CpuAttention:
    """The rows of one batch in tiles of neighbours, which threads take in equal shares."""

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
        self._shares: dict[tuple[int | None, int], NDArray[np.int64]] = {}

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        cache: LayerCache,
        window: int | None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """As in AttentionPlan."""
        narrow = cache[0].dtype is torch.bfloat16
        pools = [_array(stored) for stored in cache]
        store, attend = store_kernel(narrow), attention_kernel(queries.shape[-1], narrow)
        for new, stored in zip((keys, values), pools, strict=True):
            store(_array(new), stored, self._slots)
        wide = queries.float().contiguous()
        seen = torch.empty_like(wide)
        arrays = (wide.numpy(), seen.numpy(), *pools, self._tables, self._tiles)
        reach = UNLIMITED if window is None else window
        attend(*arrays, self._shares_of(window, keys.shape[1]), reach, soft_cap or 0.0)
        return seen.to(queries.dtype)

    def _shares_of(self, window: int | None, kv_heads: int) -> NDArray[np.int64]:
        """Where the threads' shares of the pairs of a tile and a kv head begin and end, by what they look at."""
        known = self._shares.get((window, kv_heads))
        if known is None:
            ends = self._tiles[:, 2] + self._tiles[:, 3]
            reach = ends if window is None else np.minimum(ends, window + TILE)
            done = np.repeat(self._tiles[:, 3] * reach.astype(np.int64), kv_heads).cumsum()
            threads = kernel_threads()
            known = np.searchsorted(done, np.arange(threads + 1) * done[-1] // threads)
            known[-1] = len(done)
            self._shares[window, kv_heads] = known
        return known


def prepare(head_dim: int, dtype: torch.dtype) -> None:
    """Compile the kernels for a model now, lest its first request waits for it."""
    if dtype in KINDS:
        narrow = dtype is torch.bfloat16
        store_kernel(narrow)
        attention_kernel(head_dim, narrow)


def _array(tensor: Tensor) -> NDArray[Any]:
    return tensor.view(torch.uint16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
