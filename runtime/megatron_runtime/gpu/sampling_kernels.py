"""Gumbel-max sampling over the whole vocabulary, with the noise of `engine.sampling.exponential_noise`."""

from __future__ import annotations

import triton
import triton.language as tl


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


@triton.jit
def race_tokens(
    best, places, logits, rows, tops, temperatures, leasts, lows, highs, vocabulary, logits_stride, num_parts,
    PART: tl.constexpr, BLOCK: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """The best score of each part of the vocabulary, and the first token that has it. Grid: [R, num_parts].

    Tokens come in blocks of BLOCK with a common minimum of the noise.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    exists = token < vocabulary
    address = logits + tl.load(rows + row).to(tl.int64) * logits_stride + token
    scaled = tl.load(address, mask=exists, other=float("-inf")) - tl.load(tops + row)
    scaled = scaled / tl.load(temperatures + row)
    low = tl.load(lows + row).to(tl.uint32, bitcast=True)
    high = tl.load(highs + row).to(tl.uint32, bitcast=True)
    block = ((token // BLOCK) ^ -1).to(tl.uint32, bitcast=True)
    common = mixed(mixed(block ^ low) ^ high)
    place = mixed(common ^ STREAM) & (BLOCK - 1)
    own = exponential(mixed(mixed(token.to(tl.uint32, bitcast=True) ^ low) ^ high))
    is_first = (token & (BLOCK - 1)).to(tl.uint32, bitcast=True) == place
    noise = exponential(common) / BLOCK + tl.where(is_first, 0.0, own)
    score = tl.where(exists & (scaled >= tl.load(leasts + row)), scaled - tl.log(noise), float("-inf"))
    found, at = tl.max(score, 0, return_indices=True)
    tl.store(best + row * num_parts + part, found)
    tl.store(places + row * num_parts + part, part * PART + at)


@triton.jit
def finish_race(tokens, best, places, num_parts, PARTS: tl.constexpr):
    """The token with the best score of all parts. Grid: [R]."""
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    score = tl.load(best + row * num_parts + part, mask=part < num_parts, other=float("-inf"))
    _, at = tl.max(score, 0, return_indices=True)
    tl.store(tokens + row, tl.load(places + row * num_parts + at).to(tl.int64))
