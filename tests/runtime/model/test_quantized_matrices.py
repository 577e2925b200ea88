"""Matrices that stay quantized: their codes, and products with them."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from numba import njit
from numba.core.registry import cpu_target
from runtime_support.random_blocks import random_blocks
from torch import Tensor

from megatron_runtime.model.formats.coded_rows import BLOCK, CODINGS, CodedRows
from megatron_runtime.model.kernels import integer_sums, quantized_products, vector_instructions
from megatron_runtime.model.kernels.coded_inputs import code_inputs
from megatron_runtime.model.quantized.linear import QuantizedLinear
from megatron_runtime.model.quantized.matrix import QuantizedMatrix
from megatron_runtime.model.quantized.placement import CodedPlacement

KINDS = list(CODINGS)
EXACT = [kind for kind in KINDS if not kind.endswith("_K")]
LAYOUTS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K", "Q8_0"]
"""A kind for each layout of the kernels."""
HALF = 2.0**-11
"""Relative error of a rounding to float16."""
HALF_NAN, HALF_INFINITY = (0x01, 0x7E), (0x00, 0x7C)
"""The bytes of float16."""


def stored(kind: str, rows: int, columns: int) -> np.ndarray:
    return random_blocks(GGMLQuantizationType[kind], (rows, columns))


def dequantized(kind: str, rows: int, columns: int) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(stored(kind, rows, columns), GGMLQuantizationType[kind]).copy())


def matrix(kind: str, rows: int, columns: int) -> QuantizedMatrix:
    made = QuantizedMatrix(rows, columns, CODINGS[kind])
    made.fill(0, CodedRows.of(kind, stored(kind, rows, columns)))
    return made


def inputs(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    return (made * torch.logspace(-2, 1, columns)).to(dtype)


def rounded(values: Tensor) -> Tensor:
    """What the kernels make of inputs, in float64: the nearest of 255 multiples of a block's largest number / 127."""
    blocks = values.float().unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    return ((blocks * (127 / largest)).round() * (largest / 127).double()).flatten(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_has_the_weights_of_its_file(kind: str) -> None:
    whole, expected = matrix(kind, 77, 512), dequantized(kind, 77, 512)
    close = {"atol": 0.0, "rtol": 0.0} if kind in EXACT else {"atol": 0.4 * HALF, "rtol": HALF}
    torch.testing.assert_close(whole.whole(torch.float32), expected, **close)
    assert whole.rows_of(torch.empty(0, dtype=torch.int64), torch.float32).shape == (0, 512)
    some = torch.tensor([76, 0, 33, 33])
    assert torch.equal(whole.rows_of(some, torch.bfloat16), whole.whole(torch.float32)[some].bfloat16())
    assert 0.95 < whole.num_bytes / (CODINGS[kind].num_bytes(96 * 512)) < 1.05


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_rows_and_columns_can_be_stored(kind: str) -> None:
    raw, whole = stored(kind, 70, 1024), matrix(kind, 70, 1024).whole(torch.float32)
    part = QuantizedMatrix(67, 352, CODINGS[kind])
    for start, stop in ((0, 5), (5, 40), (40, 67)):
        part.fill(start, CodedRows.of(kind, raw[3 + start : 3 + stop], slice(160, 512)))
    assert torch.equal(part.whole(torch.float32), whole[3:, 160:512])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_products_are_those_of_the_rounded_inputs(kind: str, dtype: torch.dtype) -> None:
    for rows, height, width in ((0, 33, 32), (1, 1, 256), (3, 32, 512), (7, 100, 256), (150, 40, 4608)):
        width = max(width, 256) if kind.endswith("_K") else width
        linear, given = QuantizedLinear([matrix(kind, height, width)], None, dtype), inputs(rows, width, dtype)
        made = linear(given)
        expected = rounded(given) @ linear.matrices[0].whole(torch.float64).T
        assert made.dtype is dtype
        tolerance = 1e-5 if dtype is torch.float32 else 2.0**-8
        size = float(expected.abs().amax()) if rows else 0.0
        torch.testing.assert_close(made.double(), expected, atol=tolerance * size, rtol=tolerance)


def test_a_bias_and_several_matrices_of_other_kinds_are_one_layer() -> None:
    parts = [matrix("Q4_1", 50, 256), matrix("Q6_K", 7, 256), matrix("Q4_0", 64, 256)]
    bias = torch.nn.Parameter(torch.randn(121), requires_grad=False)
    linear, given = QuantizedLinear(parts, bias, torch.float32), inputs(5, 256)
    assert linear.weight.shape == (121, 256)
    apart = torch.cat([QuantizedLinear([part], None, torch.float32)(given) for part in parts], dim=1)
    torch.testing.assert_close(linear(given), apart + bias)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_padding_is_neither_used_nor_written(kind: str) -> None:
    poisoned, clean = matrix(kind, 37, 256), matrix(kind, 37, 256)
    for panel in (poisoned._scales, poisoned._mins):
        if panel.numel():
            panel[1, ..., 5:] = torch.nan
    poisoned._codes[1, :, 0, :, 5:], poisoned._codes[1, :, 1] = 0xFF, 0xFF
    given, made = inputs(7, 256), torch.full((7, 41), 3.0)
    poisoned.multiply(code_inputs(given, poisoned.coding), None, made, 2)
    assert torch.equal(made[:, 2:39], QuantizedLinear([clean], None, torch.float32)(given))
    made[:, 2:39] = 3.0
    assert bool((made == 3.0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_bits_of_a_row_do_not_depend_on_the_others(kind: str, dtype: torch.dtype) -> None:
    linear, given = QuantizedLinear([matrix(kind, 70, 1024)], None, dtype), inputs(600, 1024, dtype)
    together = linear(given)
    for first, last in ((0, 1), (1, 3), (2, 5), (5, 12), (599, 600), (450, 599)):
        assert torch.equal(linear(given[first:last]), together[first:last]), (first, last)


def test_the_shares_of_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, given = QuantizedLinear([matrix("Q4_1", 70, 256)], None, torch.float32), inputs(9, 256)
    expected = linear(given)
    for bounds in ([0, 1, 3], [0, 0, 2, 3]):
        monkeypatch.setattr(quantized_products, "even_shares", lambda _, bounds=bounds: np.array(bounds))
        assert torch.equal(linear(given), expected)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_reach_the_results_of_their_row(wrong: float) -> None:
    linear, given = QuantizedLinear([matrix("Q4_1", 40, 128)], None, torch.float32), inputs(6, 128)
    before = linear(given)
    given[2, 100] = wrong
    after = linear(given)
    assert bool(after[2].isnan().all())
    others = torch.tensor([0, 1, 3, 4, 5])
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("kind", LAYOUTS)
def test_numbers_are_checked_of_the_rows_of_a_tensor_alone(kind: str) -> None:
    """Another thread may write the next tensor, and a number that changes while it is compared looks like NaN."""
    both = QuantizedMatrix(70, 256, CODINGS[kind])
    first, second = (CodedPlacement(both, start, (range(35),), slice(0, 256)) for start in (0, 35))
    blocks = stored(kind, 35, 256)
    both.fill(0, CodedRows.of(kind, blocks))
    wrong, factor = blocks.copy(), 208 if kind == "Q6_K" else 0
    wrong[0, factor : factor + 2], wrong[34, factor : factor + 2] = HALF_NAN, HALF_INFINITY
    both.fill(35, CodedRows.of(kind, wrong))
    scales_of_factor = 16 if kind == "Q6_K" else 1
    assert (first.count_not_finite(), second.count_not_finite()) == (0, 2 * scales_of_factor)
    assert first.numbers == second.numbers == 35 * (256 // both.coding.group + 8 * both.coding.has_mins)


def test_zeros_and_tiny_numbers_give_zeros() -> None:
    linear = QuantizedLinear([matrix("Q8_0", 40, 64)], None, torch.float32)
    assert torch.equal(linear(torch.full((2, 64), 1e-40)), torch.zeros(2, 40))


def compile_for_one_thread(function: Any, signature: Any, **_: Any) -> Any:
    return njit(signature, error_model="numpy")(function)


def has_feature(name: str) -> bool:
    return vector_instructions.has_feature(cpu_target.target_context, name)


def largest_sums(kind: str) -> tuple[QuantizedMatrix, Tensor]:
    """All bits of the codes are set, and all inputs are rounded to 127 or -127."""
    made, ones = matrix(kind, 40, 256), torch.ones(7, 256)
    made._codes[:] = 0xFF
    ones[1], ones[2, ::2], ones[3, 1::4] = -1, -1, -1
    return made, ones


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "Q6_K", "Q8_0"])
def test_the_largest_sums_are_exact(kind: str) -> None:
    largest, given = largest_sums(kind)
    exact = rounded(given) @ largest.whole(torch.float64).T
    made = QuantizedLinear([largest], None, torch.float32)(given)
    torch.testing.assert_close(made.double(), exact, atol=1e-6 * float(exact.abs().amax()), rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "feature"),
    [
        *[(kind, "") for kind in ("Q4_1", "Q8_0")],
        *[(kind, "avx2") for kind in ("Q4_1", "Q5_0", "Q6_K", "Q8_0")],
        ("Q4_1", "avx512bw"),
    ],
)
def test_all_instructions_give_the_same_bits(kind: str, feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors use those of the best feature that they have."""
    if feature and not has_feature(feature):
        pytest.skip(f"this processor has no {feature}")
    given = [(matrix(kind, 40, 256), inputs(7, 256)), largest_sums(kind)]
    expected = [QuantizedLinear([each], None, torch.float32)(rows) for each, rows in given]

    monkeypatch.setattr(integer_sums, "has_feature", lambda _, name: name == feature)
    monkeypatch.setattr(quantized_products, "compile_kernel", compile_for_one_thread)
    monkeypatch.setattr(quantized_products, "_product_kernel", cache(quantized_products._product_kernel.__wrapped__))
    for (each, rows), products in zip(given, expected, strict=True):
        assert torch.equal(QuantizedLinear([each], None, torch.float32)(rows), products)


def test_a_single_row_is_multiplied_from_memory_that_is_still_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C library overwrites the memory that a kernel without threads has released."""
    linear, given = QuantizedLinear([matrix("Q4_1", 40, 8192)], None, torch.float32), inputs(2, 8192)
    expected = linear(given)[:1]
    monkeypatch.setattr(quantized_products, "compile_kernel", compile_for_one_thread)
    monkeypatch.setattr(quantized_products, "_row_kernel", quantized_products._row_kernel.__wrapped__)
    set_option, overwrite = ctypes.CDLL(None).mallopt, -6
    set_option(overwrite, 165)
    try:
        assert torch.equal(linear(given[:1]), expected)
    finally:
        set_option(overwrite, 0)
