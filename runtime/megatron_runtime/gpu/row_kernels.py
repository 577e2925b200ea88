"""Operations on single rows, each with one read and one write of the memory."""

from __future__ import annotations

import triton
import triton.language as tl

RMS = tl.constexpr(0)
RMS_PLUS_ONE = tl.constexpr(1)
SILU = tl.constexpr(0)
GELU = tl.constexpr(1)
RELU_SQUARED = tl.constexpr(3)
HALF_ROOT = tl.constexpr(0.7071067811865476)
"""The square root of a half."""
TANH_SCALE = tl.constexpr(-1.5957691216057308)
"""Minus twice the square root of 2 / pi."""


@triton.jit
def normalized(given, weight, bias, eps, channel, exists, SIZE: tl.constexpr, KIND: tl.constexpr):
    """float32, the norm of the SIZE channels of a row, whose others are zeros.

    The quotient of RMS is rounded to the type of the row before it is multiplied with the weight, as in the training of
    the models; not that of RMS_PLUS_ONE, whose weight is one less than the factor. Other kinds subtract the mean, and
    have a bias.
    """
    wide = given.to(tl.float32)
    factor = tl.load(weight + channel, mask=exists, other=0.0).to(tl.float32)
    if KIND == RMS:
        inverse = 1.0 / tl.sqrt_rn(tl.sum(wide * wide) / SIZE + eps)
        return (wide * inverse).to(given.dtype).to(tl.float32) * factor
    if KIND == RMS_PLUS_ONE:
        inverse = 1.0 / tl.sqrt_rn(tl.sum(wide * wide) / SIZE + eps)
        return wide * inverse * (1.0 + factor)
    wide = tl.where(exists, wide - tl.sum(wide) / SIZE, 0.0)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(wide * wide) / SIZE + eps)
    return wide * inverse * factor + tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def normalize_rows(
    output, summed, rows, updates, weight, bias, update_weight, update_bias, eps, multiplier, row_stride,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, KIND: tl.constexpr, ADDS: tl.constexpr,
    NORMALIZES_UPDATES: tl.constexpr, NORMALIZES_ROWS: tl.constexpr,
):  # fmt: skip
    """Norms of rows of SIZE channels, as in `normalized`; ``rows`` begin at multiples of ``row_stride``. Grid: [rows].

    ADDS: ``updates`` times ``multiplier`` are added first, NORMALIZES_UPDATES: their norms instead, and the sums are
    written to ``summed``. What is added or normalized is rounded like the rows. Without NORMALIZES_ROWS there is no
    ``output``.
    """
    channel = tl.arange(0, SIZE_PAD)
    exists = channel < SIZE
    number = tl.program_id(0).to(tl.int64)
    place, source = number * SIZE + channel, number * row_stride + channel
    if ADDS:
        update = tl.load(updates + place, mask=exists, other=0.0)
        if NORMALIZES_UPDATES:
            update = normalized(update, update_weight, update_bias, eps, channel, exists, SIZE, KIND).to(update.dtype)
        # After the norm of the update, so that the registers have room for one row at a time.
        given = tl.load(rows + source, mask=exists, other=0.0)
        given = (given.to(tl.float32) + multiplier * update.to(tl.float32)).to(given.dtype)
        tl.store(summed + place, given, mask=exists)
    else:
        given = tl.load(rows + source, mask=exists, other=0.0)
    if NORMALIZES_ROWS:
        result = normalized(given, weight, bias, eps, channel, exists, SIZE, KIND)
        tl.store(output + place, result.to(output.dtype.element_ty), mask=exists)


@triton.jit
def normalize_part(row, weight, eps, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, KIND: tl.constexpr):
    """`normalized` of the SIZE channels at ``row``, in place."""
    channel = tl.arange(0, SIZE_PAD)
    exists = channel < SIZE
    given = tl.load(row + channel, mask=exists, other=0.0)
    result = normalized(given, weight, weight, eps, channel, exists, SIZE, KIND)
    tl.store(row + channel, result.to(given.dtype), mask=exists)


@triton.jit
def normalize_projections(
    rows, query_weight, key_weight, eps,
    QUERIES: tl.constexpr, QUERIES_PAD: tl.constexpr, KEYS: tl.constexpr, KEYS_PAD: tl.constexpr, SIZE: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """RMS or RMS_PLUS_ONE, as in `normalized`, of the first QUERIES channels of each row and of the next KEYS, in
    place. ``rows`` is [T, SIZE]. Grid: [T, 2].
    """
    row = rows + tl.program_id(0).to(tl.int64) * SIZE
    if tl.program_id(1) == 0:
        normalize_part(row, query_weight, eps, QUERIES, QUERIES_PAD, KIND)
    else:
        normalize_part(row + QUERIES, key_weight, eps, KEYS, KEYS_PAD, KIND)


@triton.jit
def normalize_heads(
    heads, query_weight, key_weight, eps,
    QUERY_HEADS: tl.constexpr, NORMALIZED: tl.constexpr, ALL: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr, KIND: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """RMS or RMS_PLUS_ONE, as in `normalized`, of the first NORMALIZED of ALL heads of each token, in place.

    ``heads`` is [T, ALL, WIDTH]; the first QUERY_HEADS have another weight than the others. Grid: [T, NORMALIZED /
    BLOCK_H].
    """
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    channel = tl.arange(0, WIDTH_PAD)
    exists = (head < NORMALIZED)[:, None] & (channel < WIDTH)[None, :]
    place = (tl.program_id(0).to(tl.int64) * ALL + head)[:, None] * WIDTH + channel[None, :]
    given = tl.load(heads + place, mask=exists, other=0.0)
    wide = given.to(tl.float32)
    query_factor = tl.load(query_weight + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    key_factor = tl.load(key_weight + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    factor = tl.where((head < QUERY_HEADS)[:, None], query_factor[None, :], key_factor[None, :])
    scaled = wide * (1.0 / tl.sqrt_rn(tl.sum(wide * wide, 1) / WIDTH + eps))[:, None]
    if KIND == RMS:
        scaled = scaled.to(given.dtype).to(tl.float32)
    else:
        factor += 1.0
    tl.store(heads + place, (scaled * factor).to(given.dtype), mask=exists)


@triton.jit
def activated(wide, ACTIVATION: tl.constexpr):
    """The activation of float32 values: SILU, GELU, RELU_SQUARED, or the approximation of GELU by a hyperbolic tangent
    (Hendrycks and Gimpel).
    """
    if ACTIVATION == SILU:
        return wide / (1.0 + tl.exp(-wide))
    if ACTIVATION == GELU:
        return 0.5 * wide * (1.0 + tl.erf(wide * HALF_ROOT))
    if ACTIVATION == RELU_SQUARED:
        return tl.where(wide <= 0.0, 0.0, wide * wide)
    # (1 + tanh(z)) / 2 is the logistic function of 2 z.
    return wide / (1.0 + tl.exp((wide + 0.044715 * wide * wide * wide) * TANH_SCALE))


@triton.jit
def rounded(wide, like):
    """float32 with the precision of the elements of ``like``."""
    return wide.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def combined(gate, value, like, alpha, limit, ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr):
    """``activation(gate) * value`` of float32 values, rounded like ``like`` between the operations, not in the end.

    The activation is one of `activated`. CLAMPED: that of `ClampedGate` instead.
    """
    if CLAMPED:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        value = tl.clamp(value, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        opened = rounded(1.0 / (1.0 + tl.exp(-rounded(alpha * gate, like))), like)
        return rounded(gate * opened, like) * rounded(value + 1.0, like)
    return rounded(activated(gate, ACTIVATION), like) * value


@triton.jit
def gate_rows(
    output, gates_and_values, alpha, limit,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    """`combined` of rows with SIZE gates and then SIZE values. Grid: [rows, SIZE / BLOCK]."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < SIZE
    gate = tl.load(gates_and_values + row * 2 * SIZE + channel, mask=exists, other=0.0)
    value = tl.load(gates_and_values + row * 2 * SIZE + SIZE + channel, mask=exists, other=0.0)
    result = combined(gate.to(tl.float32), value.to(tl.float32), output, alpha, limit, ACTIVATION, CLAMPED)
    tl.store(output + row * SIZE + channel, result.to(output.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["first", "count"])
def look_up_rows(
    output, tokens, positions, table, learned, first, count, multiplier,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_POSITIONS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Rows of a table of ``count`` rows from token ``first`` on, and zeros for other tokens. Grid: [T, SIZE / BLOCK].

    SCALED: times ``multiplier``. HAS_POSITIONS: plus the row of ``learned`` of the token's position.
    """
    place = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < SIZE
    row = tl.load(tokens + place) - first
    is_here = (row >= 0) & (row < count)
    found = tl.load(table + row * SIZE + channel, mask=exists & is_here, other=0.0)
    if SCALED:
        found = (found.to(tl.float32) * multiplier).to(found.dtype)
    if HAS_POSITIONS:
        position = tl.load(positions + place)
        learnt = tl.load(learned + position * SIZE + channel, mask=exists, other=0.0)
        found = (found.to(tl.float32) + learnt.to(tl.float32)).to(found.dtype)
    tl.store(output + place.to(tl.int64) * SIZE + channel, found, mask=exists)


@triton.jit(do_not_specialize=["count"])
def choose_tokens(output, known, sources, sampled, count, BLOCK: tl.constexpr):
    """``sampled`` at the places ``sources``, or ``known`` where these are negative: [count]. Grid: [count / BLOCK]."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = place < count
    source = tl.load(sources + place, mask=exists, other=-1)
    given = tl.load(known + place, mask=exists, other=0)
    found = tl.load(sampled + source, mask=source >= 0, other=0)
    tl.store(output + place, tl.where(source >= 0, found, given), mask=exists)


@triton.jit
def turn_positions(
    cosines, sines, positions, frequencies, magnitude, HALF: tl.constexpr, HALF_PAD: tl.constexpr
):  # fmt: skip
    """Cosines and sines of position times frequency, times ``magnitude``: rows of HALF channels, twice. Grid: [T]."""
    place = tl.program_id(0)
    channel = tl.arange(0, HALF_PAD)
    exists = channel < HALF
    angle = tl.load(positions + place).to(tl.float32) * tl.load(frequencies + channel, mask=exists, other=0.0)
    cosine = (tl.cos(angle) * magnitude).to(cosines.dtype.element_ty)
    sine = (tl.sin(angle) * magnitude).to(sines.dtype.element_ty)
    target = place.to(tl.int64) * 2 * HALF + channel
    tl.store(cosines + target, cosine, mask=exists)
    tl.store(cosines + target + HALF, cosine, mask=exists)
    tl.store(sines + target, sine, mask=exists)
    tl.store(sines + target + HALF, sine, mask=exists)
