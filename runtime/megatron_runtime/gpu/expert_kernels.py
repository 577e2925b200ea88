"""Mixtures of experts: the choice of experts for each token, and products with the matrices of the chosen ones.

A visit is a token at one of its experts: those of T tokens are T * PER_TOKEN numbers, those of a token one behind the
other. Visits are ordered by expert, and a program multiplies a tile of visits of one expert. What a program computes
for a visit does not depend on the other visits of its tile, nor on the place in it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_runtime.gpu.float8_kernels import weights_of
from megatron_runtime.gpu.row_kernels import activated, combined, rounded

SMALLEST_SUM = tl.constexpr(1e-20)
"""Added to the sum of a token's weights, which can be zero for sigmoids."""


@triton.jit
def within_best_groups(ranking, GROUPS: tl.constexpr, BEST: tl.constexpr, SUMS_TWO: tl.constexpr):
    """``ranking`` [GROUPS * members] with minus infinity outside the BEST groups, by the largest or the sum of two."""
    grouped = tl.reshape(ranking, [GROUPS, ranking.shape[0] // GROUPS])
    scores, places = tl.max(grouped, 1, return_indices=True)
    if SUMS_TWO:
        is_largest = tl.arange(0, grouped.shape[1])[None, :] == places[:, None]
        scores += tl.max(tl.where(is_largest, float("-inf"), grouped), 1)
    group = tl.arange(0, GROUPS)
    is_best = group < 0
    for _ in tl.static_range(BEST):
        _, best = tl.max(tl.where(is_best, float("-inf"), scores), 0, return_indices=True)
        is_best = is_best | (group == best)
    return tl.reshape(tl.where(is_best[:, None], grouped, float("-inf")), ranking.shape)


@triton.jit
def scores_of(logit, SIGMOID: tl.constexpr):
    """The softmax of a token's logits, or SIGMOID."""
    if SIGMOID:
        return 1.0 / (1.0 + tl.exp(-logit))
    powers = tl.exp(logit - tl.max(logit))
    return powers / tl.sum(powers)


@triton.jit
def route_rows(
    weights, chosen, logits, bias, replayed, multiplier,
    GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, MEMBERS: tl.constexpr, MEMBERS_PAD: tl.constexpr,
    BEST_GROUPS: tl.constexpr, SUMS_TWO: tl.constexpr, PER_TOKEN: tl.constexpr, PER_TOKEN_PAD: tl.constexpr,
    SIGMOID: tl.constexpr, BIASED: tl.constexpr, REPLAYED: tl.constexpr, NORMALIZES: tl.constexpr,
    ADDS_SHARED: tl.constexpr,
):  # fmt: skip
    """Select PER_TOKEN experts for each token, the largest first, and of equal ones the first. Grid: [T].

    ``logits`` is [T, GROUPS * MEMBERS]; ``weights`` and ``chosen`` are [T, PER_TOKEN]. The scores are a softmax, or
    SIGMOID. BIASED: experts are selected by score plus bias, in the BEST_GROUPS groups. REPLAYED: the experts of
    ``replayed``, unless it is negative. ADDS_SHARED: ``weights`` and ``chosen`` have one column more, of the expert
    after the last one, with weight one.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, GROUPS_PAD * MEMBERS_PAD)
    expert = place // MEMBERS_PAD * MEMBERS + place % MEMBERS_PAD
    exists = (place < GROUPS * MEMBERS_PAD) & (place % MEMBERS_PAD < MEMBERS)
    COUNT: tl.constexpr = GROUPS * MEMBERS
    logit = tl.load(logits + row * COUNT + expert, mask=exists, other=float("-inf")).to(tl.float32)
    scores = scores_of(logit, SIGMOID)
    ranking = scores
    if BIASED:
        ranking = scores + tl.load(bias + expert, mask=exists, other=0.0)
    elif SIGMOID and GROUPS == 1:
        # The sigmoids of large logits round to the same number.
        ranking = logit
    ranking = tl.where(exists, ranking, float("-inf"))
    if BEST_GROUPS < GROUPS:
        ranking = within_best_groups(ranking, GROUPS_PAD, BEST_GROUPS, SUMS_TWO)
    slot = tl.arange(0, PER_TOKEN_PAD)
    start = row * (PER_TOKEN + 1 if ADDS_SHARED else PER_TOKEN)
    picked = tl.zeros([PER_TOKEN_PAD], tl.float32)
    for each in tl.static_range(PER_TOKEN):
        _, best = tl.max(ranking, 0, return_indices=True)
        ranking = tl.where(place == best, float("-inf"), ranking)
        best = tl.minimum(best // MEMBERS_PAD * MEMBERS + best % MEMBERS_PAD, COUNT - 1).to(tl.int64)
        if REPLAYED:
            wanted = tl.load(replayed + row * PER_TOKEN + each)
            best = tl.where(wanted >= 0, wanted, best)
        tl.store(chosen + start + each, best)
        score = tl.sum(tl.where(exists & (expert == best), scores, 0.0))
        picked = tl.where(slot == each, score, picked)
    if NORMALIZES:
        picked = picked / (tl.sum(picked) + SMALLEST_SUM)
    tl.store(weights + start + slot, picked * multiplier, mask=slot < PER_TOKEN)
    if ADDS_SHARED:
        tl.store(weights + start + PER_TOKEN, 1.0)
        tl.store(chosen + start + PER_TOKEN, COUNT)


@triton.jit(do_not_specialize=["visits", "first"])
def sort_visits(order, starts, chosen, visits, first, BLOCK: tl.constexpr):
    """The visits of each expert from ``first`` on, in their order. Grid: [experts].

    The visits of expert e are ``order[starts[e] : starts[e + 1]]``. Each program counts the visits of the experts
    before its own, so that none waits for another one.
    """
    expert = first + tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for at in range(0, visits, BLOCK):
        seen = tl.load(chosen + at + lane, mask=at + lane < visits, other=-1)
        before += ((seen >= first) & (seen < expert)).to(tl.int32)
    place = tl.sum(before)
    tl.store(starts + tl.program_id(0), place)
    for at in range(0, visits, BLOCK):
        seen = tl.load(chosen + at + lane, mask=at + lane < visits, other=-1)
        is_mine = seen == expert
        mine = is_mine.to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - 1, at + lane, mask=is_mine)
        place += tl.sum(mine)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(starts + tl.program_id(0) + 1, place)


@triton.jit
def visits_of_tile(
    chosen, starts, tile, first,
    COUNT: tl.constexpr, COUNT_PAD: tl.constexpr, SINGLE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The expert of a tile, and the range of its visits in the order; an empty range beyond the last tile.

    SINGLE: there is one token, and a tile for each of its visits, which are in the order of ``chosen``.
    """
    if SINGLE:
        only = (tl.load(chosen + tile) - first).to(tl.int32)
        return only, tile, tl.where((only >= 0) & (only < COUNT), tile + 1, tile)
    expert = tl.arange(0, COUNT_PAD)
    exists = expert < COUNT
    begin = tl.load(starts + expert, mask=exists, other=0)
    end = tl.load(starts + expert + 1, mask=exists, other=0)
    last = tl.cumsum((end - begin + BLOCK_M - 1) // BLOCK_M, 0)
    mine = tl.sum((last <= tile).to(tl.int32))
    skipped = tl.max(tl.where(last <= tile, last, 0))
    start = tl.load(starts + mine, mask=mine < COUNT, other=0)
    stop = tl.load(starts + mine + 1, mask=mine < COUNT, other=0)
    return mine, start + (tile - skipped) * BLOCK_M, stop


@triton.jit
def matrix_of(matrices, offsets, expert):
    """The matrix of an expert. Offsets are multiples of 16 bytes, so that a thread reads so many at once."""
    return matrices + tl.multiple_of(tl.load(offsets + expert), 128 // matrices.dtype.element_ty.primitive_bitwidth)


@triton.jit
def product(
    rows, is_row, channels, is_channel, scales, like,
    SIZE: tl.constexpr, HEIGHT: tl.constexpr, GROUP: tl.constexpr, EXPONENT: tl.constexpr, IS_NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_M, BLOCK_N]: sums over SIZE elements of ``rows`` and ``channels``, which point to their starts.

    EXPONENT: 0, or that of the codes in ``channels``, as in `weights_of`. Then ``scales`` points to the first one of
    each channel; that of the next GROUP elements is HEIGHT numbers behind it.
    """
    inner = tl.arange(0, BLOCK_K)
    summed = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, SIZE, BLOCK_K):
        row_exists, channel_exists = is_row[:, None], is_channel[None, :]
        if SIZE % BLOCK_K != 0:
            row_exists = row_exists & (at + inner < SIZE)[None, :]
            channel_exists = channel_exists & (at + inner < SIZE)[:, None]
        one = tl.load(rows[:, None] + (at + inner)[None, :], mask=row_exists, other=0.0)
        other = tl.load(channels[None, :] + (at + inner)[:, None], mask=channel_exists, other=0.0)
        if EXPONENT > 0:
            other = weights_of(other, like, EXPONENT, IS_NATIVE)
        if EXPONENT > 0 and GROUP < SIZE:
            scale = tl.load(scales + (at // GROUP) * HEIGHT, mask=is_channel, other=0.0)
            summed += tl.dot(one, other, input_precision="ieee") * scale[None, :]
        else:
            summed = tl.dot(one, other, summed, input_precision="ieee")
    if EXPONENT > 0 and GROUP >= SIZE:
        summed *= tl.load(scales, mask=is_channel, other=0.0)[None, :]
    return summed


@triton.jit
def visits_between(order, start, stop, SINGLE: tl.constexpr, BLOCK_M: tl.constexpr):
    """BLOCK_M places in the order by expert from ``start`` on, which of them are before ``stop``, and their visits."""
    place = start + tl.arange(0, BLOCK_M)
    is_visit = place < stop
    visit = place if SINGLE else tl.load(order + place, mask=is_visit, other=0)
    return place, is_visit, visit


@triton.jit
def bias_of(biases, offsets, expert, channel, is_channel):
    """float32, those of some channels of an expert."""
    bias = biases + tl.load(offsets + expert)
    return tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["first"])
def widen_visits(
    output, hidden, chosen, order, starts, first, matrices, offsets, scales, scale_offsets, biases, bias_offsets,
    alpha, limit,
    COUNT: tl.constexpr, COUNT_PAD: tl.constexpr, SINGLE: tl.constexpr, PER_TOKEN: tl.constexpr, SIZE: tl.constexpr,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, EXPONENT: tl.constexpr, IS_NATIVE: tl.constexpr, GATED: tl.constexpr,
    BIASED: tl.constexpr, ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The first product of experts, and the activation. Grid: [channels of a matrix / BLOCK_N, tiles].

    ``hidden`` is [T, SIZE]; ``output`` gets [visits, CHANNELS] in the order by expert. ``matrices`` and ``biases`` of
    an expert are [CHANNELS, SIZE] and [CHANNELS], at its offset; GATED: of twice as many channels, gates first.
    ``scales`` are those of `product`.
    """
    expert, start, stop = visits_of_tile(chosen, starts, tl.program_id(1), first, COUNT, COUNT_PAD, SINGLE, BLOCK_M)
    if start >= stop:
        return
    place, is_visit, visit = visits_between(order, start, stop, SINGLE, BLOCK_M)
    token = visit // PER_TOKEN
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    channel, is_channel = column, column < CHANNELS
    if GATED:
        # Gates and values take turns, so that each thread has both of a channel.
        channel, is_channel = column // 2 + (column % 2) * CHANNELS, column < 2 * CHANNELS
    matrix = matrix_of(matrices, offsets, expert)
    rows, channels = hidden + token.to(tl.int64) * SIZE, matrix + channel.to(tl.int64) * SIZE
    scale = scales + tl.load(scale_offsets + expert) + channel
    HEIGHT: tl.constexpr = CHANNELS * 2 if GATED else CHANNELS
    widened = product(
        rows, is_visit, channels, is_channel, scale, hidden, SIZE, HEIGHT, GROUP, EXPONENT, IS_NATIVE,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if BIASED:
        widened += bias_of(biases, bias_offsets, expert, channel, is_channel)[None, :]
    widened = rounded(widened, hidden)
    if GATED:
        gate, value = tl.split(tl.reshape(widened, [BLOCK_M, BLOCK_N // 2, 2]))
        result = combined(gate, value, hidden, alpha, limit, ACTIVATION, CLAMPED)
        column = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        result = activated(widened, ACTIVATION)
    target = output + place.to(tl.int64)[:, None] * CHANNELS + column[None, :]
    exists = is_visit[:, None] & (column < CHANNELS)[None, :]
    tl.store(target, result.to(output.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["first"])
def narrow_visits(
    output, inputs, chosen, order, starts, first, matrices, offsets, scales, scale_offsets, biases, bias_offsets,
    COUNT: tl.constexpr, COUNT_PAD: tl.constexpr, SINGLE: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr,
    GROUP: tl.constexpr, EXPONENT: tl.constexpr, IS_NATIVE: tl.constexpr,
    BIASED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The second product of experts. Grid: [CHANNELS / BLOCK_N, tiles].

    ``inputs`` is [visits, SIZE] in the order by expert; ``output`` gets [visits, CHANNELS] in the order of the tokens.
    Those of experts elsewhere are not written. ``matrices`` is [CHANNELS, SIZE], that of an expert is at its offset.
    """
    expert, start, stop = visits_of_tile(chosen, starts, tl.program_id(1), first, COUNT, COUNT_PAD, SINGLE, BLOCK_M)
    if start >= stop:
        return
    place, is_visit, visit = visits_between(order, start, stop, SINGLE, BLOCK_M)
    channel = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_channel = channel < CHANNELS
    matrix = matrix_of(matrices, offsets, expert)
    rows, channels = inputs + place.to(tl.int64) * SIZE, matrix + channel.to(tl.int64) * SIZE
    scale = scales + tl.load(scale_offsets + expert) + channel
    result = product(
        rows, is_visit, channels, is_channel, scale, inputs, SIZE, CHANNELS, GROUP, EXPONENT, IS_NATIVE,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if BIASED:
        result += bias_of(biases, bias_offsets, expert, channel, is_channel)[None, :]
    target = output + visit.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(target, result.to(output.dtype.element_ty), mask=is_visit[:, None] & is_channel[None, :])


@triton.jit(do_not_specialize=["first"])
def sum_visits(
    output, results, weights, chosen, shared, gates, first,
    COUNT: tl.constexpr, PER_TOKEN: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
    SHARED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Sums of the results of each token, in the order of its selection. Grid: [T, SIZE / BLOCK].

    ``results`` is [T * PER_TOKEN, SIZE]; those of other experts than the COUNT ones from ``first`` on are not read.
    WEIGHTED: each is multiplied with its weight, which is rounded like the result, and so is the product. SHARED:
    ``shared`` [T, SIZE] is added to the rounded sum. GATED: times the sigmoid of ``gates`` [T], rounded likewise.
    """
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for each in tl.static_range(PER_TOKEN):
        visit = token * PER_TOKEN + each
        expert = tl.load(chosen + visit)
        is_here = (expert >= first) & (expert < first + COUNT)
        result = tl.load(results + visit * SIZE + channel, mask=exists & is_here, other=0.0).to(tl.float32)
        if WEIGHTED:
            result = rounded(result * rounded(tl.load(weights + visit), output), output)
        total += result
    if SHARED:
        result = tl.load(shared + token * SIZE + channel, mask=exists, other=0.0).to(tl.float32)
        if GATED:
            opened = rounded(1.0 / (1.0 + tl.exp(-tl.load(gates + token).to(tl.float32))), output)
            result = rounded(result * opened, output)
        total = rounded(total, output) + result
    tl.store(output + token * SIZE + channel, total.to(output.dtype.element_ty), mask=exists)
