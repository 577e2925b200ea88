"""Products by vectors: each row has its own bits, for any number of rows and any size of the matrix."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_runtime.model.kernels import vector_products
from megatron_runtime.model.kernels.product_instructions import COLUMNS, ROWS
from megatron_runtime.model.layers import Linear
from megatron_runtime.model.packed_linear import TileLinear, VectorLinear, pack_linear

DTYPES = (torch.float32, torch.bfloat16)
SIZES = ((576, 1536), (1536, 576), (2048, 96), (512, 32), (200, 70), (7, 3), (1, 1))
"""Channels and columns; rows of 512 and more channels are at distances that are copied."""

_MULTIPLY = """
import sys

import torch

from megatron_runtime.model.packed_linear import VectorLinear

inputs, weight, bias = torch.load(sys.argv[1])
with torch.inference_mode():
    torch.save([VectorLinear(weight, bias)(inputs[:rows]) for rows in range(1, len(inputs))], sys.argv[2])
"""


def needs_vectors(dtype: torch.dtype) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        not vector_products.can_use_vectors(dtype), reason=f"this processor has no vectors for {dtype}"
    )


each_type = pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=needs_vectors(dtype)) for dtype in DTYPES], ids=str
)


@pytest.fixture(params=[1, 2, 3], ids=["one thread", "two threads", "three threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def random(dtype: torch.dtype, *sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


@each_type
@pytest.mark.usefixtures("_threads")
@torch.inference_mode()
@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("has_bias", [False, True], ids=["without bias", "with bias"])
def test_rows_have_their_products_and_bits_of_their_own(
    width: int, height: int, has_bias: bool, dtype: torch.dtype
) -> None:
    weight, bias = random(dtype, height, width), random(dtype, height) if has_bias else None
    inputs = random(dtype, 100, width)
    vectors = VectorLinear(weight, bias)
    whole = vectors(inputs)
    exact = inputs.double() @ weight.double().T + (0 if bias is None else bias.double())
    rtol = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(whole.double(), exact, rtol=rtol, atol=1e-6 * width)
    for rows in (1, 2, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS, 2 * ROWS + 1, 99):
        assert torch.equal(vectors(inputs[-rows:]), whole[-rows:]), rows


@each_type
@torch.inference_mode()
def test_rows_beyond_the_cached_ones_have_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, inputs = VectorLinear(random(dtype, 128, 96)), random(dtype, 4 * ROWS + 5, 96)
    at_once = vectors(inputs)
    monkeypatch.setattr(vector_products, "_CACHED_BYTES", 1)
    assert torch.equal(vectors(inputs), at_once)


@each_type
@torch.inference_mode()
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_stay_in_their_row_and_column(value: float, dtype: torch.dtype) -> None:
    weight, inputs = random(dtype, 70, 41).abs(), random(dtype, 20, 41).abs()
    vectors = VectorLinear(weight)
    inputs[3, 5] = value
    row = vectors(inputs)
    assert row[3].isfinite().logical_not().all()
    assert row[[*range(3), *range(4, 20)]].isfinite().all()
    weight[9, 2] = value
    column = VectorLinear(weight)(random(dtype, 20, 41).abs())
    assert column[:, 9].isfinite().logical_not().all()
    assert column[:, [*range(9), *range(10, 70)]].isfinite().all()


@needs_vectors(torch.float32)
@torch.inference_mode()
def test_no_rows_are_no_products() -> None:
    assert VectorLinear(random(torch.float32, 8, 8))(random(torch.float32, 0, 8)).shape == (0, 8)


@each_type
@torch.inference_mode()
def test_matrices_are_multiplied_by_vectors_where_there_are_no_tiles(dtype: torch.dtype) -> None:
    tiles = (TileLinear,) if dtype is torch.bfloat16 else ()
    assert isinstance(pack_linear(random(dtype, 8, 8)), (VectorLinear, *tiles))


@needs_vectors(torch.float32)
@torch.inference_mode()
def test_products_are_those_of_the_plain_matrix() -> None:
    plain = Linear(48, 37, bias=True, dtype=torch.float32)
    plain.weight.copy_(random(torch.float32, 37, 48))
    plain.bias.copy_(random(torch.float32, 37))
    inputs = random(torch.float32, 5, 48)
    torch.testing.assert_close(VectorLinear(plain.weight, plain.bias)(inputs), plain(inputs))


@needs_vectors(torch.float32)
@torch.inference_mode()
def test_products_have_the_same_bits_with_the_registers_of_avx2(tmp_path: Path) -> None:
    inputs, weight, bias = (random(torch.float32, *sizes) for sizes in ((30, 200), (70, 200), (70,)))
    torch.save((inputs, weight, bias), tmp_path / "given")
    environment = os.environ | {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-c", _MULTIPLY, str(tmp_path / "given"), str(tmp_path / "products")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    expected = VectorLinear(weight, bias)(inputs)
    for rows, products in enumerate(torch.load(tmp_path / "products"), start=1):
        assert torch.equal(products, expected[:rows]), rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("height", "width"), [(32, 32), (70, 41), (1, 1)])
def test_the_matrix_can_be_had_back_from_its_panels(height: int, width: int, dtype: torch.dtype) -> None:
    matrix = random(dtype, height, width)
    assert torch.equal(vector_products.unpack(vector_products.pack(matrix), height, width), matrix)


def test_panels_hold_words_of_each_column() -> None:
    for dtype, channels in ((torch.float32, 1), (torch.bfloat16, 2)):
        matrix = random(dtype, COLUMNS + 1, 5)
        panels = vector_products.pack(matrix)
        assert panels.shape == (2, -(-5 // channels), COLUMNS * channels)
        for column, channel in ((0, 0), (31, 4), (COLUMNS, 3)):
            place = column % COLUMNS * channels + channel % channels
            assert panels[column // COLUMNS, channel // channels, place] == matrix[column, channel]
        assert panels[1, :, channels:].count_nonzero() == 0
