"""Operations on single rows, each with one read and one write of the memory."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalize_rows(output, rows, weight, eps, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr):
    """Root mean square normalization of rows of SIZE channels. Grid: [rows].

    The quotient is rounded to the type of the rows before it is multiplied with the weight, as in the training of the
    models.
    """
    channel = tl.arange(0, SIZE_PAD)
    exists = channel < SIZE
    place = tl.program_id(0).to(tl.int64) * SIZE + channel
    given = tl.load(rows + place, mask=exists, other=0.0)
    wide = given.to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(wide * wide) / SIZE + eps)
    scaled = (wide * inverse).to(given.dtype).to(tl.float32)
    factor = tl.load(weight + channel, mask=exists, other=0.0).to(tl.float32)
    tl.store(output + place, (scaled * factor).to(output.dtype.element_ty), mask=exists)


@triton.jit
def gate_rows(output, gates_and_values, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """``silu(gate) * value`` of rows with SIZE gates and then SIZE values. Grid: [rows, SIZE / BLOCK]."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < SIZE
    gate = tl.load(gates_and_values + row * 2 * SIZE + channel, mask=exists, other=0.0)
    value = tl.load(gates_and_values + row * 2 * SIZE + SIZE + channel, mask=exists, other=0.0)
    wide = gate.to(tl.float32)
    opened = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(output + row * SIZE + channel, (opened * value.to(tl.float32)).to(output.dtype.element_ty), mask=exists)
