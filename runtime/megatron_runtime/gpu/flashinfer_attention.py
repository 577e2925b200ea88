"""Attention by FlashInfer, a package that need not be installed, over the same paged cache.

A kernel of this project rotates queries and keys and writes the cache; FlashInfer (Ye et al., 2025) attends. The host
plans each pass from its own copies of the tables, so passes can't be captured in CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_runtime.gpu.attention import PagedBatch, rotate_and_store_heads

PACKAGE = "flashinfer-python"
WIDTHS = (64, 128, 256)
"""Channels of a head for which FlashInfer has kernels on all generations of GPUs."""
DTYPES = (torch.float16, torch.bfloat16)
WORKSPACE_BYTES = 128 * 2**20
"""For the results of parts of contexts, as FlashInfer recommends."""


@dataclass(frozen=True)
class PassTables:
    """The tables of a pass as FlashInfer takes them: int32 on the host."""

    query_starts: Tensor
    """[R + 1]."""
    page_starts: Tensor
    """[R + 1], prefix sums of the pages of each request."""
    pages: Tensor
    """The pages of all requests."""
    last_page_lengths: Tensor
    """[R], tokens of each request's last page."""

    @classmethod
    def of(cls, query_starts: Tensor, context_lengths: Tensor, block_tables: Tensor, page: int) -> PassTables:
        """From the tables of PagedBatch, on the host."""
        counts = (context_lengths + page - 1) // page
        used = torch.arange(block_tables.shape[1]) < counts[:, None]
        starts = torch.zeros(len(counts) + 1, dtype=torch.int32)
        torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
        return cls(query_starts, starts, block_tables[used], context_lengths - (counts - 1) * page)


class FlashInfer:
    """FlashInfer's kernels for the passes of a model, one at a time. Raises ImportError without the package."""

    def __init__(self, device: torch.device) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._make_wrapper = BatchPrefillWithPagedKVCacheWrapper
        self._device = device
        self._workspace: Tensor | None = None
        self._wrappers: dict[tuple[object, ...], Any] = {}

    def wrapper(self, kind: tuple[object, ...]) -> Any:
        """The wrapper for layers of a kind; all of them share the workspace, which is allocated at the first use."""
        if kind not in self._wrappers:
            if self._workspace is None:
                self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
            self._wrappers[kind] = self._make_wrapper(self._workspace, "HND")
        return self._wrappers[kind]


class FlashInferPass:
    """The attention of one batch."""

    def __init__(self, flashinfer: FlashInfer, batch: PagedBatch, tables: PassTables) -> None:
        self._flashinfer = flashinfer
        self._batch = batch
        self._tables = tables
        self._planned: set[tuple[object, ...]] = set()

    def attend(
        self,
        heads: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        cache: tuple[Tensor, ...],
        window: int | None,
        soft_cap: float | None,
    ) -> Tensor:
        """As `gpu.attention.attend`, for layers without sinks and chunks. Plans the first layer of each kind."""
        queries, output = rotate_and_store_heads(heads, rotation, cache, self._batch.slots)
        keys, values = cache
        kv_heads, page, width = keys.shape[1:]
        kind = (queries.shape[1], kv_heads, width, window, soft_cap)
        wrapper = self._flashinfer.wrapper(kind)
        if kind not in self._planned:
            tables = self._tables
            wrapper.plan(
                tables.query_starts,
                tables.page_starts,
                tables.pages,
                tables.last_page_lengths,
                queries.shape[1],
                kv_heads,
                width,
                page,
                causal=True,
                window_left=-1 if window is None else window - 1,
                logits_soft_cap=soft_cap,
                q_data_type=queries.dtype,
                kv_data_type=keys.dtype,
            )
            self._planned.add(kind)
        wrapper.run(queries, (keys, values), out=output)
        return output
