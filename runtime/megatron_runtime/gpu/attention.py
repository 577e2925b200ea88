"""Attention of a flat batch over a paged cache, and the choice of tile sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_runtime.gpu.attention_kernels import attend_splits, attend_tiles, rotate_and_store
from megatron_runtime.gpu.launch import capability, launch, power_of_two
from megatron_runtime.gpu.merge_kernels import merge_splits

SPLIT = 256
"""Tokens of a context that one program processes for a single query. Fixed: the sums of a query, and so its bits, would
otherwise depend on the number of other requests."""
MOST_SPLITS = 16
"""Splits of a long context, which are longer. The memory for their results is limited, and so is the grid of a CUDA
graph, which does not know the contexts. Fixed for the same reason."""
SMALLEST_DOT = 16
"""Fewest rows of a matrix product of Triton."""
WIDEST = 256
"""Most channels of a head."""
HEADS_TOGETHER = 8
"""Heads that one program rotates."""


@dataclass(frozen=True)
class TileSizes:
    """Sizes of one kernel on one generation of GPUs; the tests compile with them and count registers."""

    rows: int
    """Queries times heads of a key head."""
    keys: int
    warps: int
    stages: int


def tile_sizes(capability: int, width: int, element_bytes: int, *, is_float8: bool = False) -> TileSizes:
    """For `attend_tiles`, by compute capability and padded width of a head, and whether the cache is in fp8.

    Chosen so that nothing spills to local memory; in 16 bits for data center GPUs from Hopper on, the fastest of those
    that were measured on an H200. With wide heads or a soft cap, a few bytes of a faster kernel spill there, and some
    hundred bytes in float32, for which no other sizes were measured.
    """
    if element_bytes == 4:
        return TileSizes(rows=32, keys=32, warps=4, stages=1) if width <= 128 else TileSizes(16, 16, 4, 1)
    if has_large_shared_memory(capability):
        if width <= 64:
            return TileSizes(rows=128, keys=64, warps=4, stages=3)
        return TileSizes(rows=128, keys=128 if width <= 128 and not is_float8 else 64, warps=8, stages=2)
    return TileSizes(64, 32, 4 if width <= 128 else 8, 2)


def split_sizes(capability: int, width: int, element_bytes: int) -> TileSizes:
    """For `attend_splits`, as `tile_sizes`; ``rows`` is the least number of padded heads."""
    if element_bytes == 4:
        return TileSizes(rows=SMALLEST_DOT, keys=32, warps=4, stages=1)
    keys = 64 if width <= 128 else 32
    return TileSizes(SMALLEST_DOT, 2 * keys if has_large_shared_memory(capability) else keys, 4, 2)


def has_large_shared_memory(capability: int) -> bool:
    """Whether programs can have 227 KiB of it: GPUs of data centers from Hopper on."""
    return 90 <= capability < 120


@dataclass(frozen=True)
class PagedBatch:
    """The tables of a flat batch of T tokens from R requests, as in ForwardBatch, on the device."""

    slots: Tensor
    """int64 [T]; a negative one is of a row of padding, whose key and value are not stored."""
    query_starts: Tensor
    """int32 [R + 1]."""
    context_lengths: Tensor
    """int32 [R]."""
    block_tables: Tensor
    """int32 [R, blocks]."""


@dataclass(frozen=True)
class ScoreLimits:
    """What scores a query has, and how they are limited."""

    window: int | None
    soft_cap: float | None
    sinks: Tensor | None
    is_chunked: bool

    def numbers(self, width: int) -> tuple[float, int, float]:
        """The scale of products of vectors of this width, the window and the soft cap; 0 for none."""
        return 1 / math.sqrt(width), self.window or 0, self.soft_cap or 0.0

    def constants(self) -> dict[str, bool]:
        """Of all kernels that attend."""
        is_limited = self.window is not None
        return {
            "WINDOWED": is_limited,
            "CHUNKED": is_limited and self.is_chunked,
            "HAS_SINKS": self.sinks is not None,
        }


@dataclass(frozen=True)
class SplitResults:
    """Memory for the results of single queries over splits of their contexts."""

    count: int
    """Most splits of a context. With 1, the results are those of whole contexts, and there is no memory."""
    partial: Tensor
    """float32 [R, heads, splits, width]."""
    log_sums: Tensor
    """float32 [R, heads, splits]."""

    @classmethod
    def of(cls, output: Tensor, batch: PagedBatch, page: int) -> SplitResults:
        """For [T, heads, width], and contexts of as many tokens as the tables have blocks for."""
        requests, (_, heads, width) = len(batch.context_lengths), output.shape
        count = min(-(-batch.block_tables.shape[1] * page // SPLIT), MOST_SPLITS)
        if count <= 1:
            return cls(count, output, output)
        partial = torch.empty(requests, heads, count, width, dtype=torch.float32, device=output.device)
        return cls(count, partial, torch.empty(requests, heads, count, dtype=torch.float32, device=output.device))

    def merge_into(self, output: Tensor, batch: PagedBatch, limits: ScoreLimits) -> None:
        """Write the outputs, by one launch; nothing is left to do for whole contexts."""
        if self.count <= 1:
            return
        requests, (_, heads, width) = len(batch.context_lengths), output.shape
        sinks = output if limits.sinks is None else limits.sinks
        tables = batch.query_starts, batch.context_lengths
        launch(
            merge_splits,
            (requests, heads),
            (output, self.partial, self.log_sums, sinks, *tables, limits.window or 0, self.count),
            HEADS=heads,
            WIDTH=width,
            WIDTH_PAD=max(power_of_two(width), SMALLEST_DOT),
            **limits.constants(),
            SPLIT=SPLIT,
            MOST_SPLITS=MOST_SPLITS,
        )


def can_attend(num_arrays: int, width: int, dtype: torch.dtype) -> bool:
    """Whether these kernels support a cache of as many arrays a layer, of this width and type."""
    types = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
    return num_arrays == 2 and width <= WIDEST and dtype in types


def attend(
    heads: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    cache: tuple[Tensor, ...],
    batch: PagedBatch,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None = None,
    is_chunked: bool = False,
) -> Tensor:
    """Write new keys and values into the cache, and return what the queries see: [T, query heads, width].

    Launches 2 kernels for a batch of single tokens whose contexts fit SPLIT tokens, 3 for other batches of single
    tokens, and 4 for batches with prompts. Nothing waits for the device, and no table is copied.

    Args:
        heads: [T, query heads + 2 * key heads, width], contiguous.
        rotation: Cosines and sines [T, 1, rotated channels] in the type of the heads.
        cache: Keys and values, each [blocks, key heads, tokens of a block, width], with equal strides; uint8: the bits
            of E4M3.
        batch: The tables.
        window: Most tokens that a query sees, its own included; None: all.
        soft_cap: As in AttentionPlan, also ``sinks`` and ``is_chunked``.
    """
    limits = ScoreLimits(window, soft_cap, sinks, is_chunked)
    queries, output = rotate_and_store_heads(heads, rotation, cache, batch.slots)
    if len(queries) > len(batch.context_lengths):
        _attend_tiles(output, queries, cache, batch, limits)
    _attend_splits(output, queries, cache, batch, limits)
    return output


def rotate_and_store_heads(
    heads: Tensor, rotation: tuple[Tensor, Tensor] | None, cache: tuple[Tensor, ...], slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Write new keys and values into the cache, by one launch, with the arguments of `attend`.

    Returns:
        The rotated queries, and a tensor for their outputs, where tokens of padding have 0: they differ in nothing, so
        that they choose the same experts.
    """
    keys, values = cache
    kv_heads, page, width = keys.shape[1:]
    query_heads = heads.shape[1] - 2 * kv_heads
    queries, output = (heads.new_empty(len(heads), query_heads, width) for _ in range(2))
    cosines, sines = (heads, heads) if rotation is None else rotation
    launch(
        rotate_and_store,
        (len(heads), -(-heads.shape[1] // HEADS_TOGETHER)),
        (queries, output, heads, cosines, sines, slots, keys, values, keys.stride(0), keys.stride(1)),
        QUERY_HEADS=query_heads,
        KV_HEADS=kv_heads,
        WIDTH=width,
        WIDTH_PAD=power_of_two(width),
        TURNED=0 if rotation is None else cosines.shape[-1],
        PAGE=page,
        BLOCK_H=HEADS_TOGETHER,
    )
    return queries, output


def _attend_tiles(
    output: Tensor,
    queries: Tensor,
    cache: tuple[Tensor, ...],
    batch: PagedBatch,
    limits: ScoreLimits,
) -> None:
    keys, values = cache
    sinks = queries if limits.sinks is None else limits.sinks
    kv_heads, page, width = keys.shape[1:]
    heads, requests = queries.shape[1], len(batch.context_lengths)
    group = power_of_two(heads // kv_heads)
    is_float8 = keys.dtype is torch.uint8
    sizes = tile_sizes(capability(queries), power_of_two(width), queries.element_size(), is_float8=is_float8)
    block_q = max(sizes.rows // group, 1)
    launch(
        attend_tiles,
        (len(queries) // block_q + requests, kv_heads),
        (
            *(output, queries, keys, values, batch.block_tables, batch.query_starts, batch.context_lengths, requests),
            *(sinks, *limits.numbers(width)),
            *(keys.stride(0), keys.stride(1), batch.block_tables.stride(0)),
        ),
        **_constants(heads, width, page),
        **limits.constants(),
        GROUP=heads // kv_heads,
        GROUP_PAD=group,
        BLOCK_Q=block_q,
        BLOCK_N=sizes.keys,
        CAPPED=limits.soft_cap is not None,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )


def _attend_splits(
    output: Tensor,
    queries: Tensor,
    cache: tuple[Tensor, ...],
    batch: PagedBatch,
    limits: ScoreLimits,
) -> None:
    keys, values = cache
    sinks = queries if limits.sinks is None else limits.sinks
    kv_heads, page, width = keys.shape[1:]
    heads, requests = queries.shape[1], len(batch.context_lengths)
    splits = SplitResults.of(output, batch, page)
    sizes = split_sizes(capability(queries), power_of_two(width), queries.element_size())
    constants = _constants(heads, width, page) | limits.constants()
    launch(
        attend_splits,
        (requests, kv_heads, splits.count),
        (
            *(output, splits.partial, splits.log_sums, queries, keys, values),
            *(batch.block_tables, batch.query_starts, batch.context_lengths),
            *(sinks, *limits.numbers(width)),
            *(keys.stride(0), keys.stride(1), batch.block_tables.stride(0), splits.count),
        ),
        **constants,
        GROUP=heads // kv_heads,
        GROUP_PAD=max(power_of_two(heads // kv_heads), sizes.rows),
        SPLIT=SPLIT,
        MOST_SPLITS=MOST_SPLITS,
        BLOCK_N=sizes.keys,
        CAPPED=limits.soft_cap is not None,
        IS_WHOLE=splits.count == 1,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
    splits.merge_into(output, batch, limits)


def _constants(heads: int, width: int, page: int) -> dict[str, int | bool]:
    return {
        "HEADS": heads,
        "WIDTH": width,
        "WIDTH_PAD": max(power_of_two(width), SMALLEST_DOT),
        "PAGE": page,
    }
