"""Kernels over rows: the results of PyTorch's operators, with the same bits for a row in any batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from megatron_runtime.model.kernels.compiled import address
from megatron_runtime.model.kernels.row_kernels import (
    WORTH_SHARING,
    add_and_normalize,
    gated_silu,
    normalize_heads,
    rms_norm,
    sigmoid,
)

SIZE, EPS = 52, 1e-5
WEIGHT = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))


def normalized(rows: Tensor) -> Tensor:
    return rms_norm(rows, WEIGHT.to(rows.dtype), EPS)


def plainly_normalized(rows: Tensor) -> Tensor:
    wide = rows.double()
    scaled = wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    return WEIGHT.to(rows.dtype).double() * scaled.to(rows.dtype).double()


def plainly_gated(rows: Tensor) -> Tensor:
    gate, up = rows.double().chunk(2, dim=-1)
    return silu(gate).to(rows.dtype).double() * up


KERNELS = pytest.mark.parametrize(
    ("kernel", "plain"),
    [(normalized, plainly_normalized), (gated_silu, plainly_gated), (sigmoid, lambda rows: rows.double().sigmoid())],
    ids=["norm", "gate", "sigmoid"],
)
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
Rows = Callable[[Tensor], Tensor]


def random_rows(count: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(count, SIZE, generator=torch.Generator().manual_seed(2)) * 5).to(dtype)


@KERNELS
@TYPES
def test_a_kernel_computes_its_formula(kernel: Rows, plain: Rows, dtype: torch.dtype) -> None:
    rows = random_rows(7, dtype)
    # A value in the middle of two bfloat16 values may be rounded to either.
    close = {"atol": 2e-5, "rtol": 1e-6} if dtype is torch.float32 else {"atol": 0.0, "rtol": 2**-7}
    torch.testing.assert_close(kernel(rows).double(), plain(rows), **close)


@KERNELS
@TYPES
@pytest.mark.parametrize("count", [9, WORTH_SHARING // (SIZE // 2) + 1])
def test_a_row_has_the_same_bits_in_any_company(kernel: Rows, plain: Rows, dtype: torch.dtype, count: int) -> None:
    del plain
    rows = random_rows(count, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    together = kernel(rows)
    torch.set_num_threads(before)
    assert all(torch.equal(kernel(rows[i : i + 1])[0], together[i]) for i in range(9))


@KERNELS
@TYPES
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_stay_not_finite(kernel: Rows, plain: Rows, dtype: torch.dtype, bad: float) -> None:
    rows = random_rows(3, dtype)
    rows[1, 5] = bad
    assert torch.equal(kernel(rows).isfinite().all(-1), plain(rows).isfinite().all(-1))


@pytest.mark.parametrize("shape", [(4, 3, SIZE), (2, 1, 1, SIZE), (0, SIZE)])
def test_a_norm_is_over_the_last_of_any_dimensions(shape: tuple[int, ...]) -> None:
    rows = torch.randn(*shape)
    assert torch.equal(normalized(rows), normalized(rows.view(-1, SIZE)).view(shape))


def test_a_norm_accepts_rows_that_are_not_contiguous() -> None:
    rows = torch.randn(5, 3 * SIZE)[:, SIZE : 2 * SIZE]
    assert torch.equal(normalized(rows), normalized(rows.contiguous()))


def test_a_kernel_gets_no_address_of_memory_with_gaps() -> None:
    with pytest.raises(AssertionError):
        address(torch.zeros(4, 6)[:, :3])


@TYPES
@pytest.mark.parametrize("multiplier", [1.0, 0.22])
@pytest.mark.parametrize("count", [5, WORTH_SHARING // SIZE + 1])
def test_a_sum_and_its_norm_are_those_of_two_operations(count: int, multiplier: float, dtype: torch.dtype) -> None:
    rows, update, weight = random_rows(count, dtype), random_rows(count, dtype).flip(0), WEIGHT.to(dtype)
    summed, normed = add_and_normalize(rows, update, multiplier, weight, EPS)
    close = {"atol": 2e-5, "rtol": 1e-6} if dtype is torch.float32 else {"atol": 1e-2, "rtol": 2**-7}
    torch.testing.assert_close(summed, rows.add(update, alpha=multiplier), **close)
    assert torch.equal(normed, rms_norm(summed, weight, EPS))
    for row in range(5):
        alone = add_and_normalize(rows[row : row + 1], update[row : row + 1], multiplier, weight, EPS)
        assert all(torch.equal(one[0], whole[row]) for one, whole in zip(alone, (summed, normed), strict=True))


@TYPES
@pytest.mark.parametrize("count", [3, WORTH_SHARING // (7 * SIZE) + 1])
def test_queries_and_keys_are_normalized_in_place(dtype: torch.dtype, count: int) -> None:
    heads = random_rows(7 * count, dtype).view(count, 7, SIZE)
    of_queries, of_keys = WEIGHT.to(dtype), WEIGHT.flip(0).to(dtype)
    expected = rms_norm(heads[:, :4], of_queries, EPS), rms_norm(heads[:, 4:6], of_keys, EPS), heads[:, 6:].clone()
    normalize_heads(heads, (4, 2), (of_queries, of_keys), EPS)
    close = {"atol": 1e-6, "rtol": 1e-6} if dtype is torch.float32 else {"atol": 0.0, "rtol": 2**-7}
    torch.testing.assert_close(heads, torch.cat(expected, 1), **close)
    assert torch.equal(heads[:, 6:], expected[2])
