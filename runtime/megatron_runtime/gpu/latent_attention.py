"""Attention of a flat batch to latents in a paged cache, and the rows of queries and keys that it needs."""

from __future__ import annotations

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
from megatron_runtime.gpu.latent_attention_kernels import (
    attend_latent_splits,
    attend_latent_tiles,
    fill_latent_rows,
    rotate_and_store_latents,
)
from megatron_runtime.gpu.launch import capability, launch, power_of_two

WIDEST_LATENT = 512
WIDEST_ROTATED = 64
"""Most channels of a latent, and of those beside it that are rotated: those of DeepSeek-V2 and its successors."""
HEADS_TOGETHER = 8
"""Heads whose rows one program fills or rotates."""


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


def fill_rows(
    rows: Tensor,
    queries: Tensor,
    compressed: Tensor,
    weight: Tensor,
    eps: float,
    multiplier: float,
    *,
    is_interleaved: bool,
) -> None:
    """Write all but the latent channels of the queries into ``rows``, by one launch.

    Args:
        rows: [T, heads + 1, rotated + latent], contiguous: the queries, then the key that they share.
        queries: [T, heads, width], contiguous; their last channels are those to rotate.
        compressed: [T, latent + rotated], contiguous: the latents, and then the channels of the key to rotate.
        weight: [latent], of the norm of the latents.
        eps: Of that norm, which is `RMSNorm`.
        multiplier: Of the queries.
        is_interleaved: Whether adjacent channels are rotated together.
    """
    heads, latent = queries.shape[1], len(weight)
    rotated = rows.shape[2] - latent
    launch(
        fill_latent_rows,
        (len(rows), -(-heads // HEADS_TOGETHER) + 1),
        (rows, queries, compressed, weight, float(eps), float(multiplier)),
        HEADS=heads,
        HEAD_DIM=queries.shape[2],
        LATENT=latent,
        LATENT_PAD=power_of_two(latent),
        ROTATED=rotated,
        ROTATED_PAD=power_of_two(rotated),
        INTERLEAVED=is_interleaved,
        BLOCK_H=HEADS_TOGETHER,
    )


def attend_latents(
    rows: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    cache: Tensor,
    batch: PagedBatch,
    latent: int,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """Write new keys into the cache, and return the means of latents that the queries see: [T, heads, latent].

    As many launches as in `attention.attend`; neither waits nor copies. The result is 0 for tokens of no request, which
    have a negative slot.

    Args:
        rows: [T, heads + 1, rotated + latent], contiguous: the queries, then the key. The queries are rotated in place.
        rotation: Cosines and sines [T, 1, rotated channels] in the type of the rows.
        cache: [blocks, 1, tokens of a block, rotated + latent].
        batch: The tables.
        latent: Channels of a latent.
        window: Most tokens that a query sees, its own included; None: all.
        soft_cap: As in AttentionPlan.
    """
    heads = rows.shape[1] - 1
    output = rows.new_empty(len(rows), heads, latent)
    _rotate_and_store(output, rows, rotation, cache, batch.slots)
    limits = ScoreLimits(window, soft_cap, sinks=None, is_chunked=False)
    if len(rows) > len(batch.context_lengths):
        _attend_tiles(output, rows, cache, batch, limits)
    _attend_splits(output, rows, cache, batch, limits)
    return output


def _rotate_and_store(
    output: Tensor, rows: Tensor, rotation: tuple[Tensor, Tensor] | None, cache: Tensor, slots: Tensor
) -> None:
    heads, latent, width = output.shape[1], output.shape[2], rows.shape[2]
    cosines, sines = (rows, rows) if rotation is None else rotation
    turned = 0 if rotation is None else cosines.shape[-1]
    launch(
        rotate_and_store_latents,
        (len(rows), -(-heads // HEADS_TOGETHER) + 1),
        (rows, output, cosines, sines, slots, cache, cache.stride(0)),
        HEADS=heads,
        WIDTH=width,
        WIDTH_PAD=power_of_two(width),
        LATENT=latent,
        LATENT_PAD=power_of_two(latent),
        TURNED=turned,
        TURNED_PAD=power_of_two(max(turned, 2)),
        PAGE=cache.shape[2],
        BLOCK_H=HEADS_TOGETHER,
    )


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


def _attend_splits(output: Tensor, rows: Tensor, cache: Tensor, batch: PagedBatch, limits: ScoreLimits) -> None:
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
    splits.merge_into(output, batch, limits)


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
