"""Products with matrices in fp8 in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from gpu_support.float8 import Float8Case

from megatron_runtime.gpu import float8

E4M3, E5M2 = float8.EXPONENTS
LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3}
"""The inputs are exact, so that the errors are those of float32, and of the rounding of the result."""
CASES: dict[str, Float8Case] = {
    "one row, scales of rows": Float8Case.random(1, 40, 72),
    "rows of several tiles": Float8Case.random(17, 33, 48, is_biased=True),
    "few columns for each scale": Float8Case.random(3, 34, 160, group=32),
    "blocks, the last of which is short": Float8Case.random(5, 130, 200, group=128),
    "other bits": Float8Case.random(4, 36, 96, group=64, kind=E5M2),
}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_products_equal_those_of_float64(
    case: Float8Case, dtype: torch.dtype, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the processor has no instruction that converts the numbers."""
    monkeypatch.setattr("megatron_runtime.gpu.launch._capability", lambda _: capability)
    case = case.as_type(dtype)
    error = (case.multiply().double() - case.expected()).norm() / case.expected().norm()
    assert error <= LIMITS[dtype]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
def test_every_number_is_exact(kind: torch.dtype, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also subnormal ones, in a product with one."""
    monkeypatch.setattr("megatron_runtime.gpu.launch._capability", lambda _: capability)
    every = torch.arange(256, dtype=torch.uint8).view(kind)
    codes = every[every.float().isfinite()]
    weights = float8.Float8Weights(
        torch.nn.functional.pad(codes.view(torch.uint8)[:, None], (0, 15)),
        torch.ones(1, len(codes)),
        16,
        float8.EXPONENTS[kind],
    )
    found = float8.multiply(torch.eye(16)[:1], weights, None)
    assert torch.equal(found[0], codes.float())


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("group", [96, 32])
def test_the_bits_of_a_row_depend_on_the_size_of_the_tiles_alone(group: int) -> None:
    case = Float8Case.random(66, 40, 96, group=group)
    for rows in (16, 64, 66):
        together = case.rows(0, rows).multiply()
        assert torch.equal(case.rows(1, rows).multiply(), together[1:])
    assert torch.equal(case.rows(3, 4).multiply(), case.rows(0, 9).multiply()[3:4])
    fixed = case.multiply(rows_are_fixed=True)
    assert torch.equal(case.rows(7, 8).multiply(rows_are_fixed=True)[0], fixed[7])


@pytest.mark.parametrize(("rows", "tile"), [(1, 16), (16, 16), (17, 64), (64, 64), (65, 128), (4096, 128)])
def test_tiles_are_as_large_as_the_rows(rows: int, tile: int) -> None:
    assert float8.tile_rows(rows) == tile
