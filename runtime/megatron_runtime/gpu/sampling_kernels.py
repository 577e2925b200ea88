"""From logits to tokens: edits, exclusions, the checks for finite values, and Gumbel-max sampling.

The results of a row depend on that row alone, and each sum has a fixed order. Sizes that differ between batches are
excluded from Triton's specialization, so that nothing is compiled again.
"""

from __future__ import annotations

import triton
import triton.language as tl

ADD = tl.constexpr(0)
PENALIZE = tl.constexpr(1)
SUBTRACT = tl.constexpr(2)


@triton.jit(do_not_specialize=["count"])
def edit_logits(logits, places, values, count, OPERATION: tl.constexpr, BLOCK: tl.constexpr):
    """Change ``count`` distinct logits, given by their places in the flat logits. Grid: [count / BLOCK]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = at < count
    place = tl.load(places + at, mask=exists, other=0)
    value = tl.load(values + at, mask=exists, other=1.0)
    old = tl.load(logits + place, mask=exists, other=0.0)
    if OPERATION == ADD:
        new = old + value
    elif OPERATION == PENALIZE:
        new = tl.where(old > 0.0, tl.div_rn(old, value), old * value)
    else:
        new = old - value
    tl.store(logits + place, new, mask=exists)


@triton.jit(do_not_specialize=["logits_stride"])
def exclude_tokens(logits, rows, masks, vocabulary, logits_stride, mask_stride, PART: tl.constexpr):
    """Minus infinity for the tokens whose bits are set, except that NaN stays. Grid: [masked rows, parts].

    ``masks`` is int32 [masked rows, words], 32 tokens in each word from its lowest bit; ``rows`` has their rows.
    """
    masked = tl.program_id(0)
    token = tl.program_id(1) * PART + tl.arange(0, PART)
    exists = token < vocabulary
    word = tl.load(masks + masked.to(tl.int64) * mask_stride + token // 32, mask=exists, other=0)
    excluded = exists & (((word >> (token % 32)) & 1) == 1)
    address = logits + tl.load(rows + masked).to(tl.int64) * logits_stride + token
    old = tl.load(address, mask=excluded, other=0.0)
    tl.store(address, tl.where(old != old, old, float("-inf")), mask=excluded)


@triton.jit(do_not_specialize=["logits_stride"])
def scan_rows(best, places, logits, vocabulary, logits_stride, num_parts, PART: tl.constexpr):
    """The largest logit of each part of the vocabulary and the first token that has it; NaN if any logit is.

    Grid: [S, num_parts].
    """
    row, part = tl.program_id(0), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    given = tl.load(logits + row.to(tl.int64) * logits_stride + token, mask=token < vocabulary, other=float("-inf"))
    is_wrong = given != given
    found, at = tl.max(tl.where(is_wrong, float("-inf"), given), 0, return_indices=True)
    found = tl.where(tl.max(is_wrong.to(tl.int32), 0) > 0, float("nan"), found)
    tl.store(best + row * num_parts + part, found)
    tl.store(places + row * num_parts + part, part * PART + at)


@triton.jit
def finish_scan(tops, tokens, best, places, num_parts, PARTS: tl.constexpr):
    """The largest logit of each row and its token; NaN and -1 for a row with NaN or without a finite maximum.

    Grid: [S].
    """
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    found = tl.load(best + row * num_parts + part, mask=part < num_parts, other=float("-inf"))
    is_wrong = tl.max((found != found).to(tl.int32), 0) > 0
    top, at = tl.max(tl.where(found != found, float("-inf"), found), 0, return_indices=True)
    is_finite = (tl.abs(top) < float("inf")) & (is_wrong == 0)
    tl.store(tops + row, tl.where(is_finite, top, float("nan")))
    token = tl.load(places + row * num_parts + at)
    tl.store(tokens + row, tl.where(is_finite, token, -1).to(tl.int64))


@triton.jit
def scaled_block(row_logits, start, vocabulary, top, temperature, BLOCK: tl.constexpr):
    """Logits of a block of tokens less the maximum of the row, over the temperature: minus infinity to 0."""
    token = start + tl.arange(0, BLOCK)
    given = tl.load(row_logits + token, mask=token < vocabulary, other=float("-inf"))
    return tl.div_rn(given - top, temperature)


@triton.jit
def mixed(bits):
    """The integer hash ``lowbias32`` (Wellons 2018), of uint32."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def exponential(bits):
    """An exponential variate of mean 1 from uniform bits, uint32."""
    uniform = ((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10
    uniform = tl.minimum(uniform, 0.99999994)
    # log1p(-u) by Kahan: sampled tokens have small noise, for which the plain difference would have few digits.
    rest = 1.0 - uniform
    exact = tl.log(rest) * (uniform / tl.where(rest == 1.0, 1.0, 1.0 - rest))
    return tl.where(rest == 1.0, uniform, -exact)


@triton.jit(do_not_specialize=["logits_stride"])
def race_tokens(
    best, places, logits, tops, temperatures, leasts, lows, highs, vocabulary, logits_stride, num_parts,
    PART: tl.constexpr, BLOCK: tl.constexpr, STREAM: tl.constexpr, TRUNCATED: tl.constexpr,
):  # fmt: skip
    """The best score of each part of the vocabulary, and the first token that has it. Grid: [S, num_parts].

    A score is the scaled logit plus Gumbel noise, that of `engine.sampling.exponential_noise`: tokens come in blocks of
    BLOCK with a common minimum. Rows at temperature 0, or without a finite maximum, have no scores.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    top = tl.load(tops + row)
    temperature = tl.load(temperatures + row)
    if (temperature > 0.0) & (top == top):
        token = part * PART + tl.arange(0, PART)
        exists = token < vocabulary
        scaled = scaled_block(
            logits + row.to(tl.int64) * logits_stride, part * PART, vocabulary, top, temperature, PART
        )
        low = tl.load(lows + row).to(tl.uint32, bitcast=True)
        high = tl.load(highs + row).to(tl.uint32, bitcast=True)
        block = ((token // BLOCK) ^ -1).to(tl.uint32, bitcast=True)
        common = mixed(mixed(block ^ low) ^ high)
        place = mixed(common ^ STREAM) & (BLOCK - 1)
        own = exponential(mixed(mixed(token.to(tl.uint32, bitcast=True) ^ low) ^ high))
        is_first = (token & (BLOCK - 1)).to(tl.uint32, bitcast=True) == place
        noise = exponential(common) / BLOCK + tl.where(is_first, 0.0, own)
        is_kept = exists
        if TRUNCATED:
            is_kept = exists & (scaled >= tl.load(leasts + row))
        score = tl.where(is_kept, scaled - tl.log(noise), float("-inf"))
        found, at = tl.max(score, 0, return_indices=True)
        tl.store(best + row * num_parts + part, found)
        tl.store(places + row * num_parts + part, part * PART + at)


@triton.jit
def finish_race(tokens, best, places, tops, temperatures, num_parts, PARTS: tl.constexpr):
    """The token with the best score of all parts, where there are scores. Grid: [S]."""
    row = tl.program_id(0)
    top = tl.load(tops + row)
    if (tl.load(temperatures + row) > 0.0) & (top == top):
        part = tl.arange(0, PARTS)
        score = tl.load(best + row * num_parts + part, mask=part < num_parts, other=float("-inf"))
        _, at = tl.max(score, 0, return_indices=True)
        tl.store(tokens + row, tl.load(places + row * num_parts + at).to(tl.int64))
