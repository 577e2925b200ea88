"""Attention over a paged cache: many queries of a request in tiles, or one query of a request in splits of its context.

Both compute the softmax block by block (Dao et al., FlashAttention; Milakov and Gimelshein). The keys are visited in
blocks that begin at multiples of BLOCK_N, and a block that a query does not see leaves its sums unchanged, so the sums
of a query depend on its own context alone: neither on the other queries of its tile nor on other requests.

Triton compiles a kernel anew where a number becomes 1 or a multiple of 16; numbers that differ between batches are
excluded from that, so that no request waits for a compiler.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_runtime.gpu.float8_kernels import as_cached, numbers_of

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def limited(products, scale, soft_cap, CAPPED: tl.constexpr):
    """Scores, which times `score_factor` are those of a softmax to the base of 2."""
    if CAPPED:
        # tanh, without an overflow: the exponential of a large number is infinite, and the quotient is 0.
        turned = 2.0 * products * scale / soft_cap
        return soft_cap * (1.0 - 2.0 / (tl.exp(turned) + 1.0)) * LOG2_E
    return products


@triton.jit
def score_factor(scale, CAPPED: tl.constexpr):
    """See `limited`. Applied after the mask, together with the subtraction of the largest score, so that the blocks of
    keys that need no mask have the same bits as those that do."""
    if CAPPED:
        return 1.0
    return scale * LOG2_E


@triton.jit
def softmax_step(state, scores, factor, values):
    """Add a block of keys to the largest score, the sum of weights, and the weighted sum of values of each query."""
    top, total, summed = state
    highest = tl.maximum(top, tl.max(scores, 1) * factor)
    # Without a visible key so far, minus infinity minus minus infinity would be no number.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
    kept = tl.exp2(top - base)
    total = total * kept + tl.sum(weights, 1)
    summed = tl.dot(weights.to(values.dtype), values, summed * kept[:, None], input_precision="ieee")
    return highest, total, summed


@triton.jit
def no_keys(sinks, head, exists, ROWS: tl.constexpr, WIDTH_PAD: tl.constexpr, HAS_SINKS: tl.constexpr):
    """The state of `softmax_step` before the first block. A sink is like a key with its score and a value of zero."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + head, mask=exists, other=0.0) * LOG2_E
        total += 1.0
    return top, total, tl.zeros([ROWS, WIDTH_PAD], tl.float32)


@triton.jit
def first_key(position, window, CHUNKED: tl.constexpr):
    """The first position that queries attend to: that of the window, or of the chunk with ``window`` tokens."""
    if CHUNKED:
        return position // window * window
    return tl.maximum(position - window + 1, 0)


@triton.jit
def block_addresses(table, key, inside, channel, head_offset, block_stride, PAGE: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets of keys, or values, in the cache, and which of them exist: [keys, channels].

    ``table`` is the request's row of the block tables, ``head_offset`` the offset of the head in a block.
    """
    block = tl.load(table + key // PAGE, mask=inside, other=0).to(tl.int64)
    start = block * block_stride + head_offset + (key % PAGE) * WIDTH
    return start[:, None] + channel[None, :], inside[:, None] & (channel < WIDTH)[None, :]


@triton.jit
def attend_block(
    state, mine, position, keys, values, table, block, end, kv_head, scale, window, soft_cap, block_stride,
    head_stride, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The state of `softmax_step` after the keys from ``block`` on, for queries ``mine`` at ``position``.

    Without MASKED, the queries see all BLOCK_N of them.
    """
    channel = tl.arange(0, WIDTH_PAD)
    key = block + tl.arange(0, BLOCK_N)
    inside = key < end
    at, present = block_addresses(table, key, inside, channel, kv_head * head_stride, block_stride, PAGE, WIDTH)
    if MASKED or WIDTH != WIDTH_PAD:
        block_keys = tl.load(keys + at, mask=present, other=0.0)
        block_values = tl.load(values + at, mask=present, other=0.0)
    else:
        block_keys = tl.load(keys + at)
        block_values = tl.load(values + at)
    products = tl.dot(mine, tl.trans(numbers_of(block_keys, mine)), input_precision="ieee")
    scores = limited(products, scale, soft_cap, CAPPED)
    if MASKED:
        seen = inside[None, :] & (key[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (key[None, :] >= first_key(position, window, CHUNKED)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    return softmax_step(state, scores, score_factor(scale, CAPPED), numbers_of(block_values, mine))


@triton.jit
def attend_range(
    state, mine, position, keys, values, table, begin, masked, end, kv_head, scale, window, soft_cap, block_stride,
    head_stride, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The state of `softmax_step` after the keys from ``begin`` to ``end``, all of which before ``masked`` are seen."""
    for block in range(begin, masked, BLOCK_N):
        state = attend_block(
            state, mine, position, keys, values, table, block, end, kv_head, scale, window, soft_cap, block_stride,
            head_stride, WIDTH, WIDTH_PAD, PAGE, BLOCK_N, False, WINDOWED, CHUNKED, CAPPED,
        )  # fmt: skip
    for block in range(masked, end, BLOCK_N):
        state = attend_block(
            state, mine, position, keys, values, table, block, end, kv_head, scale, window, soft_cap, block_stride,
            head_stride, WIDTH, WIDTH_PAD, PAGE, BLOCK_N, True, WINDOWED, CHUNKED, CAPPED,
        )  # fmt: skip
    return state


@triton.jit
def request_of_tile(query_starts, tile, num_requests, BLOCK_Q: tl.constexpr):
    """The request of a tile. The tiles of request r begin at ``query_starts[r] // BLOCK_Q + r``, which leaves room for
    all of them without a table."""
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        begins = tl.load(query_starts + middle) // BLOCK_Q + middle
        low = tl.where(begins <= tile, middle + 1, low)
        high = tl.where(begins <= tile, high, middle)
    return low - 1


@triton.jit
def keys_of_tile(
    context, count, first, window, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
):  # fmt: skip
    """The range of keys for BLOCK_Q of ``count`` queries, from ``first`` on: its begin, the first key of which the
    queries need a mask, and its end. Both begins are multiples of BLOCK_N."""
    end = tl.minimum(context, context - count + first + BLOCK_Q)
    begin = 0
    # The blocks before this position are seen by all queries of the tile.
    masked = (context - count + first + 1) // BLOCK_N * BLOCK_N
    if WINDOWED:
        begin = first_key(context - count + first, window, CHUNKED) // BLOCK_N * BLOCK_N
        masked = begin
    return begin, masked, end


@triton.jit(do_not_specialize=["num_requests", "window", "table_stride"])
def attend_tiles(
    output, queries, keys, values, block_tables, query_starts, context_lengths, num_requests, sinks, scale,
    window, soft_cap, block_stride, head_stride, table_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, HAS_SINKS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Requests with more than one new token: BLOCK_Q queries of the heads of a key head in each program.

    ``queries`` and ``output`` are [T, HEADS, WIDTH]. Grid: [T // BLOCK_Q + requests, key heads].
    """
    # The last tiles of a prompt have the most keys, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    request = request_of_tile(query_starts, tile, num_requests, BLOCK_Q)
    start = tl.load(query_starts + request)
    count = tl.load(query_starts + request + 1) - start
    first = (tile - start // BLOCK_Q - request) * BLOCK_Q
    if count == 1 or first >= count:
        return
    context = tl.load(context_lengths + request)
    places = tl.arange(0, BLOCK_Q * GROUP_PAD)
    row, member = first + places // GROUP_PAD, places % GROUP_PAD
    channel = tl.arange(0, WIDTH_PAD)
    exists = ((row < count) & (member < GROUP))[:, None] & (channel < WIDTH)[None, :]
    address = ((start + row).to(tl.int64) * HEADS + kv_head * GROUP + member)[:, None] * WIDTH + channel[None, :]
    mine = tl.load(queries + address, mask=exists, other=0.0)
    position = context - count + row
    head, is_head = kv_head * GROUP + member, member < GROUP
    state = no_keys(sinks, head, is_head, BLOCK_Q * GROUP_PAD, WIDTH_PAD, HAS_SINKS)
    begin, masked, end = keys_of_tile(context, count, first, window, BLOCK_Q, BLOCK_N, WINDOWED, CHUNKED)
    table = block_tables + request.to(tl.int64) * table_stride
    _, total, summed = attend_range(
        state, mine, position, keys, values, table, begin, masked, end, kv_head, scale, window, soft_cap,
        block_stride, head_stride, WIDTH, WIDTH_PAD, PAGE, BLOCK_N, WINDOWED, CHUNKED, CAPPED,
    )  # fmt: skip
    # Rows beyond the request's see no key; they are not stored.
    mean = summed / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(output + address, mean.to(output.dtype.element_ty), mask=exists)


@triton.jit
def split_length(context, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr):
    """Tokens of each split of a context: SPLIT, or the smallest multiple that makes at most MOST_SPLITS of them."""
    return tl.maximum(tl.cdiv(tl.cdiv(context, SPLIT), MOST_SPLITS), 1) * SPLIT


@triton.jit
def keys_of_split(
    context, split, window, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """The range of keys of a split of a context for its last token; it may be empty."""
    length = split_length(context, SPLIT, MOST_SPLITS)
    begin = split * length
    end = tl.minimum(context, begin + length)
    if WINDOWED:
        begin = tl.maximum(begin, first_key(context - 1, window, CHUNKED) // BLOCK_N * BLOCK_N)
    return begin, end


@triton.jit(do_not_specialize=["window", "table_stride", "num_splits"])
def attend_splits(
    output, partial, log_sums, queries, keys, values, block_tables, query_starts, context_lengths, sinks, scale,
    window, soft_cap, block_stride, head_stride, table_stride, num_splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
    PAGE: tl.constexpr, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr, HAS_SINKS: tl.constexpr, CAPPED: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Requests with one new token: the heads of a key head, over a split of the context, in each program.

    Writes ``partial``, float32 [requests, HEADS, num_splits, WIDTH], and binary logarithms of the sums of weights; or
    ``output`` if IS_WHOLE, where every context fits one split. Grid: [requests, key heads, num_splits].
    """
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_starts + request)
    if tl.load(query_starts + request + 1) - start != 1:
        return
    context = tl.load(context_lengths + request)
    begin, end = keys_of_split(context, split, window, SPLIT, MOST_SPLITS, BLOCK_N, WINDOWED, CHUNKED)
    if begin >= end:
        return
    member, channel = tl.arange(0, GROUP_PAD), tl.arange(0, WIDTH_PAD)
    exists = (member < GROUP)[:, None] & (channel < WIDTH)[None, :]
    head = kv_head * GROUP + member
    address = (start.to(tl.int64) * HEADS + head)[:, None] * WIDTH + channel[None, :]
    mine = tl.load(queries + address, mask=exists, other=0.0)
    state = no_keys(sinks, head, member < GROUP, GROUP_PAD, WIDTH_PAD, HAS_SINKS and IS_WHOLE)
    position = tl.full([GROUP_PAD], context - 1, tl.int32)
    masked = begin if WINDOWED else begin + (end - begin) // BLOCK_N * BLOCK_N
    table = block_tables + request.to(tl.int64) * table_stride
    top, total, summed = attend_range(
        state, mine, position, keys, values, table, begin, masked, end, kv_head, scale, window, soft_cap,
        block_stride, head_stride, WIDTH, WIDTH_PAD, PAGE, BLOCK_N, WINDOWED, CHUNKED, CAPPED,
    )  # fmt: skip
    mean = summed / total[:, None]
    if IS_WHOLE:
        tl.store(output + address, mean.to(output.dtype.element_ty), mask=exists)
    else:
        place = (request.to(tl.int64) * HEADS + head) * num_splits + split
        tl.store(partial + place[:, None] * WIDTH + channel[None, :], mean, mask=exists)
        tl.store(log_sums + place, top + tl.log2(total), mask=member < GROUP)


@triton.jit
def rotate_and_store(
    rotated, output, heads, cosines, sines, slots, keys, values, block_stride, head_stride,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
    TURNED: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Rotate queries and keys, and write keys and values into the cache.

    ``heads`` is [T, QUERY_HEADS + 2 * KV_HEADS, WIDTH]; ``rotated`` gets the queries. The first TURNED channels are
    rotated, i with i + TURNED / 2; 0: none. A token whose slot is negative is not stored, but its ``output`` is 0: if
    no request has it, nothing else writes that. Grid: [T, heads / BLOCK_H].
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    channel = tl.arange(0, WIDTH_PAD)
    ALL: tl.constexpr = QUERY_HEADS + 2 * KV_HEADS
    exists = (head < ALL)[:, None] & (channel < WIDTH)[None, :]
    source = heads + (token * ALL + head)[:, None] * WIDTH
    given = tl.load(source + channel[None, :], mask=exists, other=0.0)
    turned = given
    if TURNED > 0:
        HALF: tl.constexpr = TURNED // 2
        partner = tl.where(channel < HALF, channel + HALF, channel - HALF)
        is_turned = (channel < TURNED)[None, :] & (head < QUERY_HEADS + KV_HEADS)[:, None]
        other = tl.load(source + partner[None, :], mask=exists & is_turned, other=0.0).to(tl.float32)
        cosine = tl.load(cosines + token * TURNED + channel, mask=channel < TURNED, other=1.0).to(tl.float32)
        sine = tl.load(sines + token * TURNED + channel, mask=channel < TURNED, other=0.0).to(tl.float32)
        sign = tl.where(channel < HALF, -1.0, 1.0)
        product = given.to(tl.float32) * cosine[None, :] + other * (sign * sine)[None, :]
        turned = tl.where(is_turned, product.to(given.dtype), given)
    is_query = (head < QUERY_HEADS)[:, None]
    target = (token * QUERY_HEADS + head)[:, None] * WIDTH + channel[None, :]
    tl.store(rotated + target, turned, mask=exists & is_query)
    slot = tl.load(slots + token)
    if slot >= 0:
        kv_head = (head - QUERY_HEADS) % KV_HEADS
        at = slot // PAGE * block_stride + kv_head.to(tl.int64) * head_stride + (slot % PAGE) * WIDTH
        place = at[:, None] + channel[None, :]
        is_value = (head >= QUERY_HEADS + KV_HEADS)[:, None]
        tl.store(keys + place, as_cached(turned, keys), mask=exists & ~is_query & ~is_value)
        tl.store(values + place, as_cached(given, values), mask=exists & is_value)
    else:
        tl.store(output + target, tl.zeros_like(given), mask=exists & is_query)
