"""Attention to latents in a paged cache (DeepSeek-AI, DeepSeek-V2): all query heads share one key, of which the first
ROTATED channels are rotated, and the other LATENT ones, the latent, are also the value.

The loops, splits and bits are those of `attention_kernels`. A program has some heads of one query or of several, and
reads each key once: the latents of a block are multiplied by the queries, and their mean by weights is the result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_runtime.gpu.attention_kernels import (
    first_key,
    keys_of_split,
    keys_of_tile,
    limited,
    no_keys,
    request_of_tile,
    score_factor,
    softmax_step,
)


@triton.jit
def attend_latent_block(
    state, mine, turned, position, cache, table, block, end, scale, window, soft_cap, block_stride,
    LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, ROTATED: tl.constexpr, ROTATED_PAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The state of `softmax_step` after the keys from ``block`` on, for queries at ``position``.

    ``mine`` is their part for latents, ``turned`` that for rotated channels. Without MASKED, they see all BLOCK_N keys.
    """
    channel, rotated = tl.arange(0, LATENT_PAD), tl.arange(0, ROTATED_PAD)
    key = block + tl.arange(0, BLOCK_N)
    inside = key < end
    start = tl.load(table + key // PAGE, mask=inside, other=0).to(tl.int64) * block_stride
    rows = (cache + start + (key % PAGE) * (ROTATED + LATENT))[:, None]
    if MASKED or LATENT != LATENT_PAD:
        latents = tl.load(rows + ROTATED + channel[None, :], mask=inside[:, None] & (channel < LATENT), other=0.0)
    else:
        latents = tl.load(rows + ROTATED + channel[None, :])
    if MASKED or ROTATED != ROTATED_PAD:
        keys = tl.load(rows + rotated[None, :], mask=inside[:, None] & (rotated < ROTATED), other=0.0)
    else:
        keys = tl.load(rows + rotated[None, :])
    products = tl.dot(turned, tl.trans(keys), input_precision="ieee")
    products = tl.dot(mine, tl.trans(latents), products, input_precision="ieee")
    scores = limited(products, scale, soft_cap, CAPPED)
    if MASKED:
        seen = inside[None, :] & (key[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (key[None, :] >= first_key(position, window, False)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    return softmax_step(state, scores, score_factor(scale, CAPPED), latents)


@triton.jit
def attend_latent_range(
    state, mine, turned, position, cache, table, begin, masked, end, scale, window, soft_cap, block_stride,
    LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, ROTATED: tl.constexpr, ROTATED_PAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The state of `softmax_step` after the keys from ``begin`` to ``end``, all of which before ``masked`` are seen."""
    for block in range(begin, masked, BLOCK_N):
        state = attend_latent_block(
            state, mine, turned, position, cache, table, block, end, scale, window, soft_cap, block_stride,
            LATENT, LATENT_PAD, ROTATED, ROTATED_PAD, PAGE, BLOCK_N, False, WINDOWED, CAPPED,
        )  # fmt: skip
    for block in range(masked, end, BLOCK_N):
        state = attend_latent_block(
            state, mine, turned, position, cache, table, block, end, scale, window, soft_cap, block_stride,
            LATENT, LATENT_PAD, ROTATED, ROTATED_PAD, PAGE, BLOCK_N, True, WINDOWED, CAPPED,
        )  # fmt: skip
    return state


@triton.jit
def parts_of_queries(
    rows, token, head, exists, HEADS: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr,
    ROTATED: tl.constexpr, ROTATED_PAD: tl.constexpr,
):  # fmt: skip
    """The channels for latents and the rotated ones of the queries of ``head`` and ``token``, of equal shapes.

    ``rows`` is [T, HEADS + 1, ROTATED + LATENT]; the last row of each token is its key.
    """
    channel, rotated = tl.arange(0, LATENT_PAD), tl.arange(0, ROTATED_PAD)
    WIDTH: tl.constexpr = ROTATED + LATENT
    # Shares no term with the addresses of the results, which would take registers until these are stored.
    start = rows + (token.to(tl.int64) * (HEADS * WIDTH) + head * WIDTH)[:, None]
    mine = tl.load(start + ROTATED + channel[None, :], mask=exists[:, None] & (channel < LATENT), other=0.0)
    turned = tl.load(start + rotated[None, :], mask=exists[:, None] & (rotated < ROTATED), other=0.0)
    return mine, turned


@triton.jit(do_not_specialize=["num_requests", "window", "table_stride"])
def attend_latent_tiles(
    output, rows, cache, block_tables, query_starts, context_lengths, num_requests, scale, window, soft_cap,
    block_stride, table_stride,
    HEADS: tl.constexpr, GROUP_PAD: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr,
    ROTATED: tl.constexpr, ROTATED_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Requests with more than one new token: BLOCK_Q queries of GROUP_PAD heads in each program.

    ``output`` is [T, HEADS, LATENT]. Grid: [T // BLOCK_Q + requests, HEADS / GROUP_PAD].
    """
    # The last tiles of a prompt have the most keys, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    request = request_of_tile(query_starts, tile, num_requests, BLOCK_Q)
    start = tl.load(query_starts + request)
    count = tl.load(query_starts + request + 1) - start
    first = (tile - start // BLOCK_Q - request) * BLOCK_Q
    if count == 1 or first >= count:
        return
    context = tl.load(context_lengths + request)
    places = tl.arange(0, BLOCK_Q * GROUP_PAD)
    row = first + places // GROUP_PAD
    head = tl.program_id(1) * GROUP_PAD + places % GROUP_PAD
    exists = (row < count) & (head < HEADS)
    mine, turned = parts_of_queries(
        rows, start + row, head, exists, HEADS, LATENT, LATENT_PAD, ROTATED, ROTATED_PAD
    )  # fmt: skip
    position = context - count + row
    state = no_keys(rows, head, exists, BLOCK_Q * GROUP_PAD, LATENT_PAD, False)
    begin, masked, end = keys_of_tile(context, count, first, window, BLOCK_Q, BLOCK_N, WINDOWED, False)
    table = block_tables + request.to(tl.int64) * table_stride
    _, total, summed = attend_latent_range(
        state, mine, turned, position, cache, table, begin, masked, end, scale, window, soft_cap, block_stride,
        LATENT, LATENT_PAD, ROTATED, ROTATED_PAD, PAGE, BLOCK_N, WINDOWED, CAPPED,
    )  # fmt: skip
    # Rows beyond the request's see no key; they are not stored.
    mean = summed / tl.where(total == 0.0, 1.0, total)[:, None]
    channel = tl.arange(0, LATENT_PAD)
    address = (((start + row).to(tl.int64) * HEADS + head) * LATENT)[:, None] + channel[None, :]
    tl.store(output + address, mean.to(output.dtype.element_ty), mask=exists[:, None] & (channel < LATENT))


@triton.jit(do_not_specialize=["window", "table_stride", "num_splits"])
def attend_latent_splits(
    output, partial, log_sums, rows, cache, block_tables, query_starts, context_lengths, scale, window, soft_cap,
    block_stride, table_stride, num_splits,
    HEADS: tl.constexpr, GROUP_PAD: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr,
    ROTATED: tl.constexpr, ROTATED_PAD: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Requests with one new token: GROUP_PAD heads, over a split of the context, in each program.

    Writes what `merge_splits` merges, float32 [requests, HEADS, num_splits, LATENT] and logarithms; or ``output`` if
    IS_WHOLE, where every context fits one split. Grid: [requests, HEADS / GROUP_PAD, num_splits].
    """
    request, split = tl.program_id(0), tl.program_id(2)
    start = tl.load(query_starts + request)
    if tl.load(query_starts + request + 1) - start != 1:
        return
    context = tl.load(context_lengths + request)
    begin, end = keys_of_split(context, split, window, SPLIT, MOST_SPLITS, BLOCK_N, WINDOWED, False)
    if begin >= end:
        return
    head = tl.program_id(1) * GROUP_PAD + tl.arange(0, GROUP_PAD)
    exists = head < HEADS
    token = tl.full([GROUP_PAD], start, tl.int32)
    mine, turned = parts_of_queries(rows, token, head, exists, HEADS, LATENT, LATENT_PAD, ROTATED, ROTATED_PAD)
    state = no_keys(rows, head, exists, GROUP_PAD, LATENT_PAD, False)
    position = tl.full([GROUP_PAD], context - 1, tl.int32)
    masked = begin if WINDOWED else begin + (end - begin) // BLOCK_N * BLOCK_N
    table = block_tables + request.to(tl.int64) * table_stride
    top, total, summed = attend_latent_range(
        state, mine, turned, position, cache, table, begin, masked, end, scale, window, soft_cap, block_stride,
        LATENT, LATENT_PAD, ROTATED, ROTATED_PAD, PAGE, BLOCK_N, WINDOWED, CAPPED,
    )  # fmt: skip
    mean = summed / total[:, None]
    channel = tl.arange(0, LATENT_PAD)
    stored = exists[:, None] & (channel < LATENT)
    if IS_WHOLE:
        address = ((start.to(tl.int64) * HEADS + head) * LATENT)[:, None] + channel[None, :]
        tl.store(output + address, mean.to(output.dtype.element_ty), mask=stored)
    else:
        place = (request.to(tl.int64) * HEADS + head) * num_splits + split
        tl.store(partial + place[:, None] * LATENT + channel[None, :], mean, mask=stored)
        tl.store(log_sums + place, top + tl.log2(total), mask=exists)
