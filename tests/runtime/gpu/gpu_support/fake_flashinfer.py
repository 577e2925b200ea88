"""In place of the package flashinfer: the wrapper that the engine uses, in float64 and without kernels."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch import Tensor


class BatchPrefillWithPagedKVCacheWrapper:
    """Attention of a batch over a paged cache, with the arguments of the package's class."""

    plans = 0
    """Of all wrappers."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype is torch.uint8
        assert kv_layout == "HND"
        self._plan: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        """Note the tables, which a planner on the host has to have."""
        tables = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        assert all(each.device.type == "cpu" and each.dtype is torch.int32 for each in tables)
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert all(1 <= length <= page_size for length in paged_kv_last_page_len.tolist())
        assert causal
        self._plan = tables
        self._limits = window_left, logits_soft_cap or 0.0
        self._shapes = (num_qo_heads, head_dim_qk), (num_kv_heads, page_size, head_dim_qk), q_data_type, kv_data_type
        type(self).plans += 1

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        """Attend as planned."""
        assert self._plan is not None, "plan comes before run"
        starts, page_starts, pages, last = (each.tolist() for each in self._plan)
        queries, cached, q_data_type, kv_data_type = self._shapes
        assert tuple(q.shape) == (starts[-1], *queries)
        assert all(tuple(each.shape[1:]) == cached and each.dtype is kv_data_type for each in paged_kv_cache)
        assert q.dtype is q_data_type
        page = cached[1]
        for row, length in enumerate(last):
            mine = pages[page_starts[row] : page_starts[row + 1]]
            keys, values = (
                torch.cat([array[each].double() for each in mine], dim=1)[:, : (len(mine) - 1) * page + length]
                for array in paged_kv_cache
            )
            rows = slice(starts[row], starts[row + 1])
            out[rows] = self._attention(q[rows].double(), keys, values).to(out.dtype)
        return out

    def _attention(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Of one request: [new, heads, width] over [key heads, length, width]."""
        window_left, soft_cap = self._limits
        new, length = len(queries), keys.shape[1]
        group = queries.shape[1] // len(keys)
        keys, values = (each.repeat_interleave(group, 0) for each in (keys, values))
        scores = queries.transpose(0, 1) @ keys.transpose(1, 2) / math.sqrt(queries.shape[2])
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        every = torch.arange(length, device=queries.device)
        position = every[length - new :, None]
        hidden = every > position
        if window_left >= 0:
            hidden = hidden | (every < position - window_left)
        return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ values).transpose(0, 1)


@contextmanager
def fake_flashinfer() -> Iterator[type[BatchPrefillWithPagedKVCacheWrapper]]:
    """The package can be imported, and has this class."""
    package = ModuleType("flashinfer")
    package.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    BatchPrefillWithPagedKVCacheWrapper.plans = 0
    # Not by `patch.dict`, which would also forget the modules that are imported meanwhile.
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "flashinfer", package)
        yield BatchPrefillWithPagedKVCacheWrapper
