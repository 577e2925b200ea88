"""What surrounds the attention to latents: the products with the matrices of single heads, fused with what is done to
the rows before and after them.

The tiles have fixed sizes, so that the bits of a row do not depend on the other rows of a batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_runtime.gpu.merge_kernels import merge_step, splits_of


@triton.jit
def source_of(channel, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The place of a channel to rotate. INTERLEAVED: adjacent channels become those of the first and second half."""
    if INTERLEAVED:
        return tl.where(channel < ROTATED // 2, 2 * channel, 2 * channel - ROTATED + 1)
    return channel


@triton.jit
def rotated_channels(
    start, exists, token, multiplier, cosines, sines, ROTATED: tl.constexpr, ROTATED_PAD: tl.constexpr,
    TURNED: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The channels to rotate that begin at each ``start``, times ``multiplier`` and rotated, each step rounded: [rows,
    ROTATED_PAD]."""
    channel = tl.arange(0, ROTATED_PAD)
    present = exists[:, None] & (channel < ROTATED)[None, :]
    source = source_of(channel, ROTATED, INTERLEAVED)
    given = tl.load(start[:, None] + source[None, :], mask=present, other=0.0)
    result = (given.to(tl.float32) * multiplier).to(given.dtype)
    if TURNED > 0:
        HALF: tl.constexpr = TURNED // 2
        partner = tl.where(channel < HALF, channel + HALF, channel - HALF)
        turned = present & (channel < TURNED)[None, :]
        source = source_of(partner, ROTATED, INTERLEAVED)
        other = tl.load(start[:, None] + source[None, :], mask=turned, other=0.0)
        other = (other.to(tl.float32) * multiplier).to(given.dtype).to(tl.float32)
        angle = token[:, None] * TURNED + channel[None, :]
        cosine = tl.load(cosines + angle, mask=turned, other=1.0).to(tl.float32)
        sine = tl.load(sines + angle, mask=turned, other=0.0).to(tl.float32)
        sign = tl.where(channel < HALF, -1.0, 1.0)[None, :]
        product = result.to(tl.float32) * cosine + other * (sign * sine)
        result = tl.where(turned, product.to(given.dtype), result)
    return result


@triton.jit
def store_keys(
    compressed, weight, cosines, sines, slots, cache, token, exists, eps, compressed_stride, block_stride,
    LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, ROTATED: tl.constexpr, ROTATED_PAD: tl.constexpr,
    TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Write the rotated channels and the normalized latents of some tokens into the cache."""
    slot = tl.load(slots + token, mask=exists, other=-1)
    stored = slot >= 0
    given = compressed + token * compressed_stride
    place = cache + slot // PAGE * block_stride + (slot % PAGE) * (ROTATED + LATENT)
    turned = rotated_channels(
        given + LATENT, stored, token, 1.0, cosines, sines, ROTATED, ROTATED_PAD, TURNED, INTERLEAVED
    )  # fmt: skip
    rotated, channel = tl.arange(0, ROTATED_PAD), tl.arange(0, LATENT_PAD)
    tl.store(place[:, None] + rotated[None, :], turned, mask=stored[:, None] & (rotated < ROTATED)[None, :])
    present = stored[:, None] & (channel < LATENT)[None, :]
    latent = tl.load(given[:, None] + channel[None, :], mask=present, other=0.0)
    wide = latent.to(tl.float32)
    factor = tl.load(weight + channel, mask=channel < LATENT, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 1) / LATENT + eps)
    # Rounded as in `normalize_rows`.
    result = (wide * inverse[:, None]).to(latent.dtype).to(tl.float32) * factor[None, :]
    tl.store(place[:, None] + ROTATED + channel[None, :], result.to(latent.dtype), mask=present)


@triton.jit
def absorbed(
    start, exists, matrix, place, HEAD_DIM: tl.constexpr, LATENT: tl.constexpr, ROTATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The products of the queries that begin at each ``start`` and the columns ``place`` of the matrix of their
    head."""
    PLAIN: tl.constexpr = HEAD_DIM - ROTATED
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, PLAIN, BLOCK_K):
        channel = begin + tl.arange(0, BLOCK_K)
        given = start[:, None] + channel[None, :]
        queries = tl.load(given, mask=exists[:, None] & (channel < PLAIN)[None, :], other=0.0)
        factors = matrix + channel[:, None] * LATENT + place[None, :]
        rows = tl.load(factors, mask=(channel < PLAIN)[:, None] & (place < LATENT)[None, :], other=0.0)
        sums = tl.dot(queries, rows, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["num_tokens"])
def absorb_and_store(
    rows, queries, compressed, up, weight, cosines, sines, slots, cache, num_tokens, eps, multiplier,
    compressed_stride, block_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, UP_ROWS: tl.constexpr, LATENT: tl.constexpr,
    LATENT_PAD: tl.constexpr, ROTATED: tl.constexpr, ROTATED_PAD: tl.constexpr, TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Write the queries that attend to latents into ``rows``, and the keys of the same tokens into the cache.

    ``rows`` is [T, HEADS, ROTATED + LATENT]; ``queries`` [T, HEADS, HEAD_DIM], of which the last ROTATED channels are
    rotated and the others multiplied by the first rows of their head in ``up``, [HEADS, UP_ROWS, LATENT], all times
    ``multiplier``. ``compressed`` has rows [LATENT + ROTATED], as projected from the hidden state. Of the channels to
    rotate, the first TURNED are, i with i + TURNED / 2; 0: none. A key whose slot is negative is not stored.
    Grid: [T / BLOCK_M, HEADS * LATENT / BLOCK_N + BLOCK_M / KEYS]; the last programs have KEYS keys each.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    COLUMNS: tl.constexpr = (LATENT + BLOCK_N - 1) // BLOCK_N
    if part >= HEADS * COLUMNS:
        token = (tile * BLOCK_M + (part - HEADS * COLUMNS) * KEYS + tl.arange(0, KEYS)).to(tl.int64)
        store_keys(
            compressed, weight, cosines, sines, slots, cache, token, token < num_tokens, eps, compressed_stride,
            block_stride, LATENT, LATENT_PAD, ROTATED, ROTATED_PAD, TURNED, INTERLEAVED, PAGE,
        )  # fmt: skip
        return
    head, column = part // COLUMNS, part % COLUMNS
    token = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    exists = token < num_tokens
    start = queries + (token * HEADS + head) * HEAD_DIM
    target = rows + (token * HEADS + head) * (ROTATED + LATENT)
    place = column * BLOCK_N + tl.arange(0, BLOCK_N)
    matrix = up + head.to(tl.int64) * UP_ROWS * LATENT
    sums = absorbed(start, exists, matrix, place, HEAD_DIM, LATENT, ROTATED, BLOCK_M, BLOCK_N, BLOCK_K)
    result = (sums * multiplier).to(rows.dtype.element_ty)
    stored = exists[:, None] & (place < LATENT)[None, :]
    tl.store(target[:, None] + ROTATED + place[None, :], result, mask=stored)
    if column == 0:
        rotated = tl.arange(0, ROTATED_PAD)
        turned = rotated_channels(
            start + HEAD_DIM - ROTATED, exists, token, multiplier, cosines, sines, ROTATED, ROTATED_PAD, TURNED,
            INTERLEAVED,
        )  # fmt: skip
        tl.store(target[:, None] + rotated[None, :], turned, mask=exists[:, None] & (rotated < ROTATED)[None, :])


@triton.jit
def merged_means(
    partial, log_sums, request, head, exists, context, window, num_splits, HEADS: tl.constexpr,
    LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """As `merge_splits`, of one head of several requests: [BLOCK_M, LATENT_PAD]; 0 for those that do not exist."""
    begin, end = splits_of(context, window, SPLIT, MOST_SPLITS, WINDOWED, False)
    channel = tl.arange(0, LATENT_PAD)
    first = (request.to(tl.int64) * HEADS + head) * num_splits
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    state = top, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, LATENT_PAD], tl.float32)
    lowest = tl.min(tl.where(exists, begin, MOST_SPLITS), 0)
    for split in range(lowest, tl.max(tl.where(exists, end, 0), 0)):
        inside = exists & (split >= begin) & (split < end)
        log_sum = tl.load(log_sums + first + split, mask=inside, other=float("-inf"))
        address = ((first + split) * LATENT)[:, None] + channel[None, :]
        mean = tl.load(partial + address, mask=inside[:, None] & (channel < LATENT)[None, :], other=0.0)
        state = merge_step(state, log_sum, mean)
    _, total, summed = state
    return summed / tl.where(exists, total, 1.0)[:, None]


@triton.jit
def store_columns(place, result, exists, column, WIDTH: tl.constexpr):
    """Write columns of the rows that exist and begin at each ``place``."""
    tl.store(place[:, None] + column[None, :], result, mask=exists[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_requests", "window", "num_splits"])
def merge_and_expand(
    values, means, log_sums, up, slots, query_starts, context_lengths, num_tokens, num_requests, window, num_splits,
    HEADS: tl.constexpr, UP_ROWS: tl.constexpr, WIDTH: tl.constexpr, LATENT: tl.constexpr,
    LATENT_PAD: tl.constexpr, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr, MERGES: tl.constexpr,
):  # fmt: skip
    """Project the means of latents to ``values``, [T, HEADS, WIDTH], by the last rows of each head in ``up``, [HEADS,
    UP_ROWS, LATENT].

    With MERGES, ``means`` and ``log_sums`` are the results of `attend_latent_splits`, and no request has several
    tokens, of which there are no more than requests. Otherwise, ``means`` is [T, HEADS, LATENT]. Tokens with a
    negative slot have values of 0. Grid: [T / BLOCK_M, HEADS].
    """
    index, head = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1)
    channel, latent = tl.arange(0, BLOCK_N), tl.arange(0, LATENT_PAD)
    row = index
    exists = index < num_tokens
    has_slot = tl.load(slots + index, mask=exists, other=-1) >= 0
    if MERGES:
        is_request = index < num_requests
        row = tl.load(query_starts + index, mask=is_request, other=0)
        known = is_request & (tl.load(query_starts + index + 1, mask=is_request, other=0) - row == 1)
        known = known & (tl.load(slots + row, mask=known, other=-1) >= 0)
        context = tl.load(context_lengths + index, mask=known, other=1)
        mean = merged_means(
            means, log_sums, index, head, known, context, window, num_splits, HEADS, LATENT, LATENT_PAD, SPLIT,
            MOST_SPLITS, BLOCK_M, WINDOWED,
        )  # fmt: skip
        zeros = tl.zeros([BLOCK_M, BLOCK_N], values.dtype.element_ty)
    else:
        address = ((row.to(tl.int64) * HEADS + head) * LATENT)[:, None] + latent[None, :]
        mean = tl.load(means + address, mask=has_slot[:, None] & (latent < LATENT)[None, :], other=0.0)
    place = (row.to(tl.int64) * HEADS + head) * WIDTH
    matrix = up + (head.to(tl.int64) * UP_ROWS + UP_ROWS - WIDTH) * LATENT
    mean = mean.to(values.dtype.element_ty)
    for begin in range(0, WIDTH, BLOCK_N):
        column = begin + channel
        factors = matrix + column[:, None] * LATENT + latent[None, :]
        rows = tl.load(factors, mask=(column < WIDTH)[:, None] & (latent < LATENT)[None, :], other=0.0)
        result = tl.dot(mean, tl.trans(rows), input_precision="ieee").to(values.dtype.element_ty)
        if MERGES:
            store_columns(values + place, result, known, column, WIDTH)
            empty = values + (index.to(tl.int64) * HEADS + head) * WIDTH
            store_columns(empty, zeros, exists & ~has_slot, column, WIDTH)
        else:
            store_columns(values + place, result, exists, column, WIDTH)
