"""Truncations of rows of logits: the lowest logit that top-n-sigma, top-k, top-p and min-p keep together.

A threshold is found by a search over the bits of the logits, whose rounds each read a row. Nearly always, the tokens
that can be kept are few, so the search reads a short list of candidates, which many programs collect, instead of the
whole vocabulary: those that are at least as likely as the most likely tokens of a quarter of the vocabulary's blocks.
The list decides only where a search reads; where it does not suffice, the search reads the vocabulary.

The results of a row depend on that row alone, and each sum has a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_runtime.gpu.sampling_kernels import scaled_block

ALL_KEYS = tl.constexpr(0x7F800000)
"""The key of minus infinity, which is the largest."""
WAYS = tl.constexpr(16)
"""Thresholds that each round of a search compares."""
COUNT = tl.constexpr(0)
"""Places of a part's statistics: the candidates, the sum of the exponentials of all its logits, the number of logits
that are not minus infinity, their mean, and the sum of the squares of their differences from it."""
MASS = tl.constexpr(1)
FINITE = tl.constexpr(2)
MEAN = tl.constexpr(3)
SQUARES = tl.constexpr(4)
STATISTICS = tl.constexpr(5)


@triton.jit
def needs_candidates(row, tops, temperatures, sigmas, top_ks, top_ps):
    """Whether truncations other than min-p exclude tokens of a row."""
    top = tl.load(tops + row)
    top_p = tl.load(top_ps + row)
    is_truncated = (tl.load(sigmas + row) > 0.0) | (tl.load(top_ks + row) > 0) | ((top_p > 0.0) & (top_p < 1.0))
    return is_truncated & (tl.load(temperatures + row) > 0.0) & (top == top)


@triton.jit
def tokens_of_part(part, num_parts, VOCABULARY_BLOCK: tl.constexpr, PART: tl.constexpr):
    """The tokens of every ``num_parts``-th block of the vocabulary, so that the likely ones, which tokenizers often
    number first, are in different parts: int32 [PART]."""
    place = tl.arange(0, PART)
    return (part + place // VOCABULARY_BLOCK * num_parts) * VOCABULARY_BLOCK + place % VOCABULARY_BLOCK


@triton.jit(do_not_specialize=["logits_stride"])
def find_block_maxima(
    maxima, logits, tops, temperatures, sigmas, top_ks, top_ps, vocabulary, logits_stride, num_parts,
    VOCABULARY_BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The largest logit of each block of the vocabulary: [S, num_parts * PART / VOCABULARY_BLOCK].

    Grid: [S, num_parts].
    """
    row, part = tl.program_id(0), tl.program_id(1)
    if needs_candidates(row, tops, temperatures, sigmas, top_ks, top_ps):
        BLOCKS: tl.constexpr = PART // VOCABULARY_BLOCK
        token = part * PART + tl.arange(0, PART)
        row_logits = logits + row.to(tl.int64) * logits_stride
        given = tl.load(row_logits + token, mask=token < vocabulary, other=float("-inf"))
        found = tl.max(tl.reshape(given, [BLOCKS, VOCABULARY_BLOCK]), 1)
        tl.store(maxima + (row * num_parts + part) * BLOCKS + tl.arange(0, BLOCKS), found)


@triton.jit
def value_at_sum(
    row_logits, vocabulary, top, temperature, least, target, IS_COUNT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The largest scaled logit for which the tokens that are at least as likely have a sum of ``target``; minus
    infinity if there is none.

    What is summed are these tokens if IS_COUNT, otherwise the exponentials of those that are not below ``least``. The
    bits of a number that is not positive, without its sign, grow as it falls: a search by WAYS thresholds a round.
    """
    low = -1
    high = ALL_KEYS
    way = tl.arange(0, WAYS)
    while high - low > 1:
        step = (high - low + WAYS - 1) // WAYS
        threshold = low + step * (way + 1)
        sums = tl.zeros([WAYS, BLOCK], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            scaled = scaled_block(row_logits, start, vocabulary, top, temperature, BLOCK)
            key = tl.abs(scaled).to(tl.int32, bitcast=True)
            if IS_COUNT:
                weight = tl.where(start + tl.arange(0, BLOCK) < vocabulary, 1.0, 0.0)
            else:
                weight = tl.where(scaled >= least, tl.exp(scaled), 0.0)
            sums += tl.where(key[None, :] <= threshold[:, None], weight[None, :], 0.0)
        below = tl.sum((tl.sum(sums, 1) < target).to(tl.int32), 0)
        # Not the sum of the new bounds, which can be too large for an int32 where no threshold has the target.
        low = tl.minimum(low + step * below, high - 1)
        high = low + tl.minimum(high - low, step)
    return -high.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["likely_blocks"])
def find_floors(
    floors, maxima, tops, temperatures, sigmas, top_ks, top_ps, num_blocks, likely_blocks, BLOCK: tl.constexpr
):  # fmt: skip
    """The scaled logit that ``likely_blocks`` of the blocks of each row reach. Grid: [S]."""
    row = tl.program_id(0)
    if needs_candidates(row, tops, temperatures, sigmas, top_ks, top_ps):
        top, temperature = tl.load(tops + row), tl.load(temperatures + row)
        row_maxima, target = maxima + row * num_blocks, likely_blocks.to(tl.float32)
        floor = value_at_sum(row_maxima, num_blocks, top, temperature, float("-inf"), target, True, BLOCK)
        tl.store(floors + row, floor)


@triton.jit(do_not_specialize=["logits_stride"])
def collect_candidates(
    candidates, statistics, logits, floors, tops, temperatures, sigmas, top_ks, top_ps, vocabulary, logits_stride,
    num_parts, VOCABULARY_BLOCK: tl.constexpr, PART: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The logits of each part that reach the row's floor, and statistics of the part.

    ``candidates`` is [S, num_parts, CAPACITY], with minus infinity where there are fewer; ``statistics`` is [S,
    STATISTICS, num_parts]. Grid: [S, num_parts].
    """
    row, part = tl.program_id(0), tl.program_id(1)
    if needs_candidates(row, tops, temperatures, sigmas, top_ks, top_ps):
        top, temperature = tl.load(tops + row), tl.load(temperatures + row)
        token = tokens_of_part(part, num_parts, VOCABULARY_BLOCK, PART)
        address = logits + row.to(tl.int64) * logits_stride + token
        given = tl.load(address, mask=token < vocabulary, other=float("-inf"))
        scaled = tl.div_rn(given - top, temperature)
        is_finite = scaled > float("-inf")
        is_candidate = is_finite & (scaled >= tl.load(floors + row))
        rank = tl.cumsum(is_candidate.to(tl.int32), 0)
        count = tl.sum(is_candidate.to(tl.int32), 0)
        # Candidates come first, and then the others: each place is written once.
        place = tl.where(is_candidate, rank - 1, count + tl.arange(0, PART) - rank)
        target = candidates + (row * num_parts + part).to(tl.int64) * CAPACITY + place
        tl.store(target, tl.where(is_candidate, given, float("-inf")), mask=place < CAPACITY)
        number = tl.sum(is_finite.to(tl.float32), 0)
        difference = tl.where(is_finite, given - top, 0.0)
        mean = tl.sum(difference, 0) / tl.maximum(number, 1.0)
        distance = tl.where(is_finite, difference - mean, 0.0)
        place_of_part = statistics + row * STATISTICS * num_parts + part
        tl.store(place_of_part + COUNT * num_parts, count.to(tl.float32))
        tl.store(place_of_part + MASS * num_parts, tl.sum(tl.exp(scaled), 0))
        tl.store(place_of_part + FINITE * num_parts, number)
        tl.store(place_of_part + MEAN * num_parts, mean)
        tl.store(place_of_part + SQUARES * num_parts, tl.sum(distance * distance, 0))


@triton.jit
def statistic(statistics, row, which, num_parts, PARTS: tl.constexpr):
    """One statistic of all parts of a row, and 0 for parts that do not exist: float32 [PARTS]."""
    part = tl.arange(0, PARTS)
    return tl.load(statistics + (row * STATISTICS + which) * num_parts + part, mask=part < num_parts, other=0.0)


@triton.jit
def deviation(statistics, row, num_parts, PARTS: tl.constexpr):
    """The standard deviation of the logits that are not minus infinity, from those of the parts (Chan et al.)."""
    count = statistic(statistics, row, FINITE, num_parts, PARTS)
    mean = statistic(statistics, row, MEAN, num_parts, PARTS)
    squares = statistic(statistics, row, SQUARES, num_parts, PARTS)
    number = tl.sum(count, 0)
    difference = mean - tl.sum(count * mean, 0) / number
    return tl.sqrt_rn((tl.sum(squares, 0) + tl.sum(count * difference * difference, 0)) / number)


@triton.jit
def mass_from(row_logits, vocabulary, top, temperature, least, BLOCK: tl.constexpr):
    """The sum of the exponentials of the scaled logits that are not below ``least``."""
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        scaled = scaled_block(row_logits, start, vocabulary, top, temperature, BLOCK)
        mass += tl.where(scaled >= least, tl.exp(scaled), 0.0)
    return tl.sum(mass, 0)


@triton.jit(do_not_specialize=["logits_stride"])
def truncate_rows(
    leasts, logits, candidates, statistics, floors, tops, temperatures, sigmas, top_ks, top_ps, min_ps, vocabulary,
    logits_stride, num_parts, PARTS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The lowest scaled logit that each row keeps, after top-n-sigma, top-k, top-p and min-p in this order.

    Parameters that are 0, and a top-p of 1, exclude nothing. Grid: [S].
    """
    row = tl.program_id(0)
    top = tl.load(tops + row)
    temperature = tl.load(temperatures + row)
    least = float("-inf")
    if needs_candidates(row, tops, temperatures, sigmas, top_ks, top_ps):
        row_logits = logits + row.to(tl.int64) * logits_stride
        listed = candidates + row.to(tl.int64) * num_parts * CAPACITY
        places = num_parts * CAPACITY
        floor = tl.load(floors + row)
        counts = statistic(statistics, row, COUNT, num_parts, PARTS)
        is_complete = tl.max(counts, 0) <= CAPACITY
        has_all = is_complete & (floor == float("-inf"))
        sigma = tl.load(sigmas + row)
        if sigma > 0.0:
            least = tl.maximum(least, -sigma * tl.div_rn(deviation(statistics, row, num_parts, PARTS), temperature))
        top_k = tl.load(top_ks + row)
        if (top_k > 0) & (top_k < vocabulary):
            target = top_k.to(tl.float32)
            if has_all | (is_complete & (tl.sum(counts, 0) >= target)):
                found = value_at_sum(listed, places, top, temperature, least, target, True, BLOCK)
            else:
                found = value_at_sum(row_logits, vocabulary, top, temperature, least, target, True, BLOCK)
            least = tl.maximum(least, found)
        top_p = tl.load(top_ps + row)
        if (top_p > 0.0) & (top_p < 1.0):
            covered = mass_from(listed, places, top, temperature, least, BLOCK)
            if is_complete & (least >= floor):
                mass = covered
            elif least == float("-inf"):
                mass = tl.sum(statistic(statistics, row, MASS, num_parts, PARTS), 0)
            else:
                mass = mass_from(row_logits, vocabulary, top, temperature, least, BLOCK)
            target = top_p * mass
            if has_all | (is_complete & (covered >= target)):
                found = value_at_sum(listed, places, top, temperature, least, target, False, BLOCK)
            else:
                found = value_at_sum(row_logits, vocabulary, top, temperature, least, target, False, BLOCK)
            least = tl.maximum(least, found)
    min_p = tl.load(min_ps + row)
    if (min_p > 0.0) & (temperature > 0.0) & (top == top):
        least = tl.maximum(least, tl.log(min_p))
    tl.store(leasts + row, least)
