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
    start = rows + ((token.to(tl.int64) * (HEADS + 1) + head) * (ROTATED + LATENT))[:, None]
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


@triton.jit
def fill_key(target, given, weight, eps, source, rotated, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr,
             ROTATED: tl.constexpr):  # fmt: skip
    """The row of a key from its latent and its channels to rotate, which come from the places ``source``."""
    is_rotated = rotated < ROTATED
    tl.store(target + rotated, tl.load(given + LATENT + source, mask=is_rotated), mask=is_rotated)
    channel = tl.arange(0, LATENT_PAD)
    exists = channel < LATENT
    latent = tl.load(given + channel, mask=exists, other=0.0)
    wide = latent.to(tl.float32)
    factor = tl.load(weight + channel, mask=exists, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(wide * wide) / LATENT + eps)
    # Rounded as in `normalize_rows`.
    result = (wide * inverse).to(latent.dtype).to(tl.float32) * factor
    tl.store(target + ROTATED + channel, result.to(latent.dtype), mask=exists)


@triton.jit
def fill_queries(target, queries, head, multiplier, source, rotated, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                 WIDTH: tl.constexpr, ROTATED: tl.constexpr):  # fmt: skip
    """The channels to rotate of some heads of a token, whose rows and queries begin at the two pointers."""
    exists = (head < HEADS)[:, None] & (rotated < ROTATED)[None, :]
    start = (head * HEAD_DIM + HEAD_DIM - ROTATED)[:, None]
    query = tl.load(queries + start + source[None, :], mask=exists)
    scaled = (query.to(tl.float32) * multiplier).to(query.dtype)
    tl.store(target + head[:, None] * WIDTH + rotated[None, :], scaled, mask=exists)


@triton.jit
def fill_latent_rows(
    rows, queries, compressed, weight, eps, multiplier,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr,
    ROTATED: tl.constexpr, ROTATED_PAD: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Write the channels to rotate of queries and keys, and the normalized latents, into ``rows``.

    ``rows`` is [T, HEADS + 1, ROTATED + LATENT], ``queries`` [T, HEADS, HEAD_DIM], whose last ROTATED channels are
    taken times ``multiplier``, and ``compressed`` [T, LATENT + ROTATED], as projected from the hidden state.
    INTERLEAVED: adjacent channels become channels of the first and the second half. Grid: [T, HEADS / BLOCK_H + 1].
    """
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rotated = tl.arange(0, ROTATED_PAD)
    source = rotated
    if INTERLEAVED:
        source = tl.where(rotated < ROTATED // 2, 2 * rotated, 2 * rotated - ROTATED + 1)
    WIDTH: tl.constexpr = ROTATED + LATENT
    target = rows + token * (HEADS + 1) * WIDTH
    if part == tl.num_programs(1) - 1:
        given = compressed + token * WIDTH
        fill_key(target + HEADS * WIDTH, given, weight, eps, source, rotated, LATENT, LATENT_PAD, ROTATED)
    else:
        head = part * BLOCK_H + tl.arange(0, BLOCK_H)
        given = queries + token * HEADS * HEAD_DIM
        fill_queries(target, given, head, multiplier, source, rotated, HEADS, HEAD_DIM, WIDTH, ROTATED)


@triton.jit
def store_key(place, source, cosines, sines, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, TURNED: tl.constexpr):
    """Write the rotated row at ``source`` to ``place`` in the cache."""
    channel = tl.arange(0, WIDTH_PAD)
    exists = channel < WIDTH
    key = tl.load(source + channel, mask=exists)
    if TURNED > 0:
        HALF: tl.constexpr = TURNED // 2
        is_turned = channel < TURNED
        partner = tl.where(channel < HALF, channel + HALF, channel - HALF)
        other = tl.load(source + partner, mask=is_turned, other=0.0).to(tl.float32)
        cosine = tl.load(cosines + channel, mask=is_turned, other=1.0).to(tl.float32)
        sine = tl.load(sines + channel, mask=is_turned, other=0.0).to(tl.float32)
        product = key.to(tl.float32) * cosine + other * (tl.where(channel < HALF, -1.0, 1.0) * sine)
        key = tl.where(is_turned, product.to(key.dtype), key)
    tl.store(place + channel, key.to(place.dtype.element_ty), mask=exists)


@triton.jit
def rotate_queries(target, cosines, sines, head, HEADS: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr,
                   TURNED_PAD: tl.constexpr):  # fmt: skip
    """Rotate some heads of a token, whose rows begin at ``target``, in place."""
    HALF: tl.constexpr = TURNED // 2
    channel = tl.arange(0, TURNED_PAD // 2)
    exists = (head < HEADS)[:, None] & (channel < HALF)[None, :]
    first = target + (head * WIDTH)[:, None] + channel[None, :]
    one = tl.load(first, mask=exists)
    other = tl.load(first + HALF, mask=exists)
    # With few channels, several threads have the same ones, and none may read what another has written.
    tl.debug_barrier()
    cosine = tl.load(cosines + channel, mask=channel < HALF).to(tl.float32)[None, :]
    sine = tl.load(sines + channel, mask=channel < HALF).to(tl.float32)[None, :]
    wide, wide_other = one.to(tl.float32), other.to(tl.float32)
    tl.store(first, (wide * cosine - wide_other * sine).to(one.dtype), mask=exists)
    tl.store(first + HALF, (wide_other * cosine + wide * sine).to(one.dtype), mask=exists)


@triton.jit
def rotate_and_store_latents(
    rows, output, cosines, sines, slots, cache, block_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, LATENT: tl.constexpr,
    LATENT_PAD: tl.constexpr, TURNED: tl.constexpr, TURNED_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Rotate the queries in ``rows``, and write the keys, rotated too, into the cache.

    ``rows`` is [T, HEADS + 1, WIDTH]. The first TURNED channels are rotated, i with i + TURNED / 2; 0: none. A token
    whose slot is negative is not stored, but its ``output``, [HEADS, LATENT], is 0: if no request has it, nothing else
    writes that. Grid: [T, HEADS / BLOCK_H + 1].
    """
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    target = rows + token * (HEADS + 1) * WIDTH
    angles = token * TURNED
    slot = tl.load(slots + token)
    if part == tl.num_programs(1) - 1:
        if slot >= 0:
            place = cache + slot // PAGE * block_stride + (slot % PAGE) * WIDTH
            source = target + HEADS * WIDTH
            store_key(place, source, cosines + angles, sines + angles, WIDTH, WIDTH_PAD, TURNED)
    else:
        head = part * BLOCK_H + tl.arange(0, BLOCK_H)
        if TURNED > 0:
            rotate_queries(target, cosines + angles, sines + angles, head, HEADS, WIDTH, TURNED, TURNED_PAD)
        if slot < 0:
            latent = tl.arange(0, LATENT_PAD)
            place = output + ((token * HEADS + head) * LATENT)[:, None] + latent[None, :]
            nothing = tl.zeros([BLOCK_H, LATENT_PAD], output.dtype.element_ty)
            tl.store(place, nothing, mask=(head < HEADS)[:, None] & (latent < LATENT)[None, :])
