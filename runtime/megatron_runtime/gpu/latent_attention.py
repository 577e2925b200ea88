"""Attention of a flat batch to latents in a paged cache, and the rows of queries and keys that it needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_runtime.gpu import attention
from megatron_runtime.gpu.attention import (
    SMALLEST_DOT,
    PagedBatch,
    ScoreLimits,
    SplitResults,
    TileSizes,
    has_large_shared_memory,
)
from megatron_runtime.gpu.latent_attention_kernels import attend_latent_splits, attend_latent_tiles
from megatron_runtime.gpu.latent_product_kernels import absorb_and_store, merge_and_expand
from megatron_runtime.gpu.launch import capability, launch, power_of_two

WIDEST_LATENT = 512
WIDEST_ROTATED = 64
"""Most channels of a latent, and of those beside it that are rotated: those of DeepSeek-V2 and its successors."""
KEYS_TOGETHER = 4
"""Tokens whose keys one program writes."""


@dataclass(frozen=True)
class LatentMatrices:
    """The matrices of a layer's heads, and what else is done to its queries and latents."""

    up: Tensor
    """[heads, N + value width, latent], contiguous: of each head the rows that project a latent to its key, then those
    that project it to its value."""
    norm: tuple[Tensor, float]
    """Weight, [latent], and epsilon of the norm of the latents, which is `RMSNorm`."""
    multiplier: float
    """Of the queries."""
    value_width: int
    is_interleaved: bool
    """Whether adjacent channels are rotated together."""


@dataclass(frozen=True)
class HeadProductSizes:
    """Sizes of the products with the matrices of heads: the same for every batch, because the bits of a row would
    otherwise depend on it."""

    rows: int
    """Tokens of a program."""
    columns: int
    """Channels of the result that are computed together."""
    inner: int
    """Channels that are summed together."""
    warps: int
    stages: int


def product_sizes(element_bytes: int) -> HeadProductSizes:
    """For `absorb_and_store`. Chosen by compilation alone, as all sizes of this module."""
    if element_bytes == 4:
        return HeadProductSizes(rows=16, columns=256, inner=64, warps=8, stages=1)
    return HeadProductSizes(rows=64, columns=128, inner=64, warps=4, stages=2)


def expansion_sizes(element_bytes: int, latent: int) -> HeadProductSizes:
    """For `merge_and_expand`, which sums all channels of a latent together."""
    if element_bytes == 4:
        return HeadProductSizes(rows=16, columns=16, inner=latent, warps=8, stages=1)
    return HeadProductSizes(rows=32, columns=32, inner=latent, warps=8, stages=2)


def tile_sizes(capability: int, element_bytes: int) -> TileSizes:
    """For `attend_latent_tiles`, by compute capability; ``rows`` is queries times heads.

    Chosen by compilation alone: nothing spills to local memory with the widest latents.
    """
    if element_bytes == 4:
        return TileSizes(rows=SMALLEST_DOT, keys=16, warps=8, stages=1)
    if has_large_shared_memory(capability):
        return TileSizes(rows=32, keys=64, warps=8, stages=2)
    return TileSizes(rows=32, keys=32, warps=8, stages=2)


def split_sizes(capability: int, heads: int, element_bytes: int) -> TileSizes:
    """For `attend_latent_splits`, as `tile_sizes`; ``rows`` is the number of heads in a program."""
    if element_bytes == 4 or heads > SMALLEST_DOT:
        return tile_sizes(capability, element_bytes)
    return TileSizes(rows=SMALLEST_DOT, keys=32, warps=4, stages=2)


def can_attend_latents(width: int, latent: int, dtype: torch.dtype) -> bool:
    """Whether these kernels support keys of this width and type whose last channels are latents."""
    fits = latent <= WIDEST_LATENT and 0 < width - latent <= WIDEST_ROTATED
    return fits and dtype in (torch.float32, torch.float16, torch.bfloat16)


def attend_latents(
    queries: Tensor,
    compressed: Tensor,
    matrices: LatentMatrices,
    rotation: tuple[Tensor, Tensor] | None,
    cache: Tensor,
    batch: PagedBatch,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """Write new keys into the cache, and return the values that the queries see: [T, heads, value width].

    Launches 3 kernels for a batch of single tokens, 4 for others whose contexts fit SPLIT tokens, and 5 for others.
    Nothing waits or copies. The result is 0 for tokens of no request, which have a negative slot.

    Args:
        queries: [T, heads, width], contiguous; their last channels are those to rotate.
        compressed: [T, latent + rotated], of which each row is contiguous: the latents, and then the channels of the
            key to rotate.
        matrices: Of the layer.
        rotation: Cosines and sines [T, 1, rotated channels] in the type of the queries.
        cache: [blocks, 1, tokens of a block, rotated + latent].
        batch: The tables.
        window: Most tokens that a query sees, its own included; None: all.
        soft_cap: As in AttentionPlan.
    """
    rows = absorb_and_store_latents(queries, compressed, matrices, rotation, cache, batch.slots)
    limits = ScoreLimits(window, soft_cap, sinks=None, is_chunked=False)
    has_several = len(rows) > len(batch.context_lengths)
    latent = matrices.up.shape[2]
    means = rows.new_empty(*queries.shape[:2], latent)
    if has_several:
        _attend_tiles(means, rows, cache, batch, limits)
    splits = _attend_splits(means, rows, cache, batch, limits)
    if has_several:
        splits.merge_into(means, batch, limits)
    return _expand(means, None if has_several or splits.count <= 1 else splits, matrices, batch, limits)


def absorb_and_store_latents(
    queries: Tensor,
    compressed: Tensor,
    matrices: LatentMatrices,
    rotation: tuple[Tensor, Tensor] | None,
    cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """Write new keys into the cache, by one launch, with the arguments of `attend_latents`.

    Returns:
        The queries that attend to the cache: [T, heads, rotated + latent].
    """
    tokens, heads, head_dim = queries.shape
    rotated, latent = cache.shape[3] - matrices.up.shape[2], matrices.up.shape[2]
    turned = 0 if rotation is None else rotation[0].shape[-1]
    assert turned <= rotated, "the latents have no positions"
    rows = queries.new_empty(tokens, heads, rotated + latent)
    (cosines, sines), (weight, eps) = (rows, rows) if rotation is None else rotation, matrices.norm
    sizes = product_sizes(queries.element_size())
    columns = min(max(power_of_two(latent), SMALLEST_DOT), sizes.columns)
    launch(
        absorb_and_store,
        (-(-tokens // sizes.rows), heads * -(-latent // columns) + sizes.rows // KEYS_TOGETHER),
        (
            *(rows, queries, compressed, matrices.up, weight, cosines, sines, slots, cache, tokens),
            *(float(eps), float(matrices.multiplier), compressed.stride(0), cache.stride(0)),
        ),
        HEADS=heads,
        HEAD_DIM=head_dim,
        UP_ROWS=matrices.up.shape[1],
        LATENT=latent,
        LATENT_PAD=power_of_two(latent),
        ROTATED=rotated,
        ROTATED_PAD=power_of_two(rotated),
        TURNED=turned,
        INTERLEAVED=matrices.is_interleaved,
        PAGE=cache.shape[2],
        BLOCK_M=sizes.rows,
        BLOCK_N=columns,
        BLOCK_K=sizes.inner,
        KEYS=KEYS_TOGETHER,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
    return rows


def _attend_tiles(output: Tensor, rows: Tensor, cache: Tensor, batch: PagedBatch, limits: ScoreLimits) -> None:
    heads, requests = output.shape[1], len(batch.context_lengths)
    sizes = tile_sizes(capability(rows), rows.element_size())
    group = min(power_of_two(heads), sizes.rows)
    block_q = sizes.rows // group
    launch(
        attend_latent_tiles,
        (len(rows) // block_q + requests, -(-heads // group)),
        (
            *(output, rows, cache, batch.block_tables, batch.query_starts, batch.context_lengths, requests),
            *(*limits.numbers(rows.shape[2]), cache.stride(0), batch.block_tables.stride(0)),
        ),
        **_constants(output, rows, cache, limits),
        GROUP_PAD=group,
        BLOCK_Q=block_q,
        BLOCK_N=sizes.keys,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )


def _attend_splits(output: Tensor, rows: Tensor, cache: Tensor, batch: PagedBatch, limits: ScoreLimits) -> SplitResults:
    heads, requests = output.shape[1], len(batch.context_lengths)
    splits = SplitResults.of(output, batch, cache.shape[2])
    sizes = split_sizes(capability(rows), heads, rows.element_size())
    group = min(max(power_of_two(heads), SMALLEST_DOT), sizes.rows)
    launch(
        attend_latent_splits,
        (requests, -(-heads // group), splits.count),
        (
            *(output, splits.partial, splits.log_sums, rows, cache),
            *(batch.block_tables, batch.query_starts, batch.context_lengths),
            *(*limits.numbers(rows.shape[2]), cache.stride(0), batch.block_tables.stride(0), splits.count),
        ),
        **_constants(output, rows, cache, limits),
        SPLIT=attention.SPLIT,
        MOST_SPLITS=attention.MOST_SPLITS,
        GROUP_PAD=group,
        BLOCK_N=sizes.keys,
        IS_WHOLE=splits.count == 1,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
    return splits


def _expand(
    means: Tensor, splits: SplitResults | None, matrices: LatentMatrices, batch: PagedBatch, limits: ScoreLimits
) -> Tensor:
    """The values of means [T, heads, latent], or of the splits that are not merged: [T, heads, value width]."""
    tokens, heads, latent = means.shape
    requests, pad = len(batch.context_lengths), max(power_of_two(latent), SMALLEST_DOT)
    values = means.new_empty(tokens, heads, matrices.value_width)
    sizes = expansion_sizes(means.element_size(), pad)
    given = (means, means) if splits is None else (splits.partial, splits.log_sums)
    launch(
        merge_and_expand,
        (-(-max(tokens, requests if splits is not None else 0) // sizes.rows), heads),
        (
            *(values, *given, matrices.up, batch.slots, batch.query_starts, batch.context_lengths, tokens, requests),
            *(limits.window or 0, 0 if splits is None else splits.count),
        ),
        HEADS=heads,
        UP_ROWS=matrices.up.shape[1],
        WIDTH=matrices.value_width,
        LATENT=latent,
        LATENT_PAD=sizes.inner,
        SPLIT=attention.SPLIT,
        MOST_SPLITS=attention.MOST_SPLITS,
        BLOCK_M=sizes.rows,
        BLOCK_N=sizes.columns,
        WINDOWED=limits.window is not None,
        MERGES=splits is not None,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
    return values


def _constants(output: Tensor, rows: Tensor, cache: Tensor, limits: ScoreLimits) -> dict[str, int | bool]:
    _, heads, latent = output.shape
    width, page = rows.shape[2], cache.shape[2]
    return {
        "HEADS": heads,
        "LATENT": latent,
        "LATENT_PAD": max(power_of_two(latent), SMALLEST_DOT),
        "ROTATED": width - latent,
        "ROTATED_PAD": max(power_of_two(width - latent), SMALLEST_DOT),
        "PAGE": page,
        "WINDOWED": limits.window is not None,
        "CAPPED": limits.soft_cap is not None,
    }
