"""Products with matrices of 8-bit floating-point numbers, which are converted in registers.

The inputs are not rounded: a weight of 8 bits is exact in each type of inputs, so that the only errors are those of
sums in float32 and of one rounding of the result. The scale of some columns of a row multiplies their sum.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weights_of(codes, like, EXPONENT: tl.constexpr, IS_NATIVE: tl.constexpr):
    """Codes with EXPONENT bits of exponent, in the type of the elements of ``like``.

    IS_NATIVE: they have a type that the processor converts. Otherwise they are bytes, whose bits are moved to those of
    a float32 with the same exponent and mantissa; a factor makes up for the other bias, and is exact, also for
    subnormal numbers.
    """
    if IS_NATIVE:
        kind = tl.float8e4nv if EXPONENT == 4 else tl.float8e5
        return codes.to(kind, bitcast=True).to(like.dtype.element_ty)
    bits = codes.to(tl.int32)
    moved = ((bits & 0x80) << 24) | ((bits & 0x7F) << (16 + EXPONENT))
    FACTOR: tl.constexpr = 2.0 ** (128 - 2 ** (EXPONENT - 1))
    return (moved.to(tl.float32, bitcast=True) * FACTOR).to(like.dtype.element_ty)


@triton.jit
def numbers_of(cached, like):
    """Elements of a KV cache in the type of the elements of ``like``; bytes are the bits of E4M3."""
    if cached.dtype == tl.uint8:
        return cached.to(tl.float8e4nv, bitcast=True).to(like.dtype)
    else:  # noqa: RET505 - Triton compiles what follows a return
        return cached


@triton.jit
def e4m3_of(wide):
    """The bits of E4M3 for float32, rounded to the nearest, of two equally near ones to the even one. By integers,
    because Triton's interpreter loses the carry of a rounded mantissa."""
    bits = wide.to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
    rounded = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20
    # Sums with 2 ** 14 are rounded to multiples of 2 ** -9, those of numbers below the smallest normal one.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, rounded - (120 << 3))
    code = tl.where(wide == wide, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def as_cached(numbers, cache):
    """Numbers in the type of a KV cache's elements; as bits of E4M3, beyond whose range they become its largest
    number."""
    if cache.dtype.element_ty == tl.uint8:
        return e4m3_of(numbers.to(tl.float32))
    else:  # noqa: RET505 - Triton compiles what follows a return
        return numbers.to(cache.dtype.element_ty)


@triton.jit
def tile_of(program, row_tiles, channel_tiles, TOGETHER: tl.constexpr):
    """The tile of channels and that of rows of a program: TOGETHER tiles of channels have all rows one after another,
    so that several programs read the same weights and inputs at a time."""
    group = program // (TOGETHER * row_tiles)
    first = group * TOGETHER
    size = tl.minimum(channel_tiles - first, TOGETHER)
    within = program % (TOGETHER * row_tiles)
    return first + within % size, within // size


@triton.jit(do_not_specialize=["count"])
def multiply_float8(
    output, inputs, codes, scales, bias, count,
    SIZE: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr, EXPONENT: tl.constexpr, IS_NATIVE: tl.constexpr,
    BIASED: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``inputs W^T + bias`` for [count, SIZE] inputs: [count, CHANNELS]. Grid: [tiles of channels and rows].

    ``codes`` is [CHANNELS, SIZE]; ``scales``, float32 [SIZE / GROUP, CHANNELS], has one for GROUP columns of a row.
    GROUP is a multiple of BLOCK_K, or at least SIZE. The weights are the left operand, because tensor cores read that
    one from registers, where it is converted.
    """
    channel_tile, row_tile = tile_of(tl.program_id(0), tl.cdiv(count, BLOCK_M), tl.cdiv(CHANNELS, BLOCK_N), TOGETHER)
    channel = channel_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    is_channel, is_row = channel < CHANNELS, row < count
    matrix = codes + channel.to(tl.int64)[:, None] * SIZE
    given = inputs + row.to(tl.int64)[None, :] * SIZE
    summed = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in range(0, SIZE, BLOCK_K):
        channel_exists, row_exists = is_channel[:, None], is_row[None, :]
        if SIZE % BLOCK_K != 0:
            channel_exists = channel_exists & (at + inner < SIZE)[None, :]
            row_exists = row_exists & (at + inner < SIZE)[:, None]
        stored = tl.load(matrix + (at + inner)[None, :], mask=channel_exists, other=0)
        columns = tl.load(given + (at + inner)[:, None], mask=row_exists, other=0.0)
        weights = weights_of(stored, inputs, EXPONENT, IS_NATIVE)
        if GROUP < SIZE:
            scale = tl.load(scales + (at // GROUP) * CHANNELS + channel, mask=is_channel, other=0.0)
            summed += tl.dot(weights, columns, input_precision="ieee") * scale[:, None]
        else:
            summed = tl.dot(weights, columns, summed, input_precision="ieee")
    if GROUP >= SIZE:
        summed *= tl.load(scales + channel, mask=is_channel, other=0.0)[:, None]
    if BIASED:
        summed += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[:, None]
    target = output + row.to(tl.int64)[None, :] * CHANNELS + channel[:, None]
    tl.store(target, summed.to(output.dtype.element_ty), mask=is_channel[:, None] & is_row[None, :])
