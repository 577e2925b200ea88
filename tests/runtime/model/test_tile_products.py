"""Products by tiles (Intel AMX): the bits of oneDNN for any number of rows; the kernel compiles on any processor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_runtime.model.kernels import tile_products
from megatron_runtime.model.kernels.tile_instructions import BLOCK, STEP, configuration
from megatron_runtime.model.packed_linear import PackedLinear, TileLinear, pack_linear

needs_tiles = pytest.mark.skipif(not tile_products.can_use_tiles(), reason="this processor has no AMX with bfloat16")

_COMPILE = """
from megatron_runtime.model.kernels import tile_products
from megatron_runtime.model.kernels.kernel_compiler import compile_in_this_process

compile_in_this_process()
(code,) = tile_products._product_kernel().inspect_asm().values()
print(*(code.count(name) for name in ("ldtilecfg", "tdpbf16ps", "tilestored", "tilerelease")))
"""


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def random(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).bfloat16()


@needs_tiles
@pytest.mark.usefixtures("_threads")
@torch.inference_mode()
@pytest.mark.parametrize(
    ("width", "height"), [(576, 1536), (1536, 576), (768, 2048), (4096, 96), (32, 32), (200, 70), (7, 3)]
)
@pytest.mark.parametrize("has_bias", [False, True], ids=["without bias", "with bias"])
def test_products_have_the_bits_of_onednn(width: int, height: int, has_bias: bool) -> None:
    weight, bias = random(height, width), random(height) if has_bias else None
    inputs = random(300, width)
    tiles, plain = TileLinear(weight, bias), PackedLinear(weight, bias)
    for rows in (1, 2, 15, 16, 17, 31, 32, 33, 49, 300):
        assert torch.equal(tiles(inputs[:rows]), plain(inputs[:rows])), rows


@needs_tiles
@torch.inference_mode()
def test_rows_beyond_the_cached_ones_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles, inputs = TileLinear(random(128, 96)), random(4 * BLOCK + 5, 96)
    at_once = tiles(inputs)
    monkeypatch.setattr(tile_products, "_CACHED_BYTES", 1)
    assert torch.equal(tiles(inputs), at_once)


@needs_tiles
@torch.inference_mode()
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_stay_in_their_row_and_column(value: float) -> None:
    weight, inputs = random(70, 40).abs(), random(20, 40).abs()
    tiles = TileLinear(weight)
    inputs[3, 5] = value
    row = tiles(inputs)
    assert row[3].isfinite().logical_not().all()
    assert row[[*range(3), *range(4, 20)]].isfinite().all()
    weight[9, 2] = value
    column = TileLinear(weight)(random(20, 40).abs())
    assert column[:, 9].isfinite().logical_not().all()
    assert column[:, [*range(9), *range(10, 70)]].isfinite().all()


@needs_tiles
@torch.inference_mode()
def test_no_rows_are_no_products() -> None:
    assert TileLinear(random(8, 8))(random(0, 8)).shape == (0, 8)


@needs_tiles
def test_a_matrix_in_bfloat16_is_multiplied_by_tiles() -> None:
    assert isinstance(pack_linear(random(8, 8)), TileLinear)


def test_a_matrix_in_float32_is_not_multiplied_by_tiles() -> None:
    assert not isinstance(pack_linear(random(8, 8).float()), TileLinear)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (70, 40), (1, 1)])
def test_the_matrix_can_be_had_back_from_its_panels(height: int, width: int) -> None:
    matrix = random(height, width)
    assert torch.equal(tile_products.unpack(tile_products.pack(matrix), height, width), matrix)


def test_panels_hold_pairs_of_channels_of_each_column() -> None:
    matrix = random(BLOCK + 1, STEP + 3)
    panels = tile_products.pack(matrix)
    assert panels.shape == (2, 2, 2, 16, 16, 2)
    for column, channel in ((0, 0), (17, 5), (31, STEP + 2), (BLOCK, STEP)):
        panel, tile, lane = column // BLOCK, column % BLOCK // 16, column % 16
        step, pair, half = channel // STEP, channel % STEP // 2, channel % 2
        assert panels[panel, step, tile, pair, lane, half] == matrix[column, channel]
    assert panels[1, :, 0, :, 1:].count_nonzero() == 0


def test_tiles_have_16_rows_of_64_bytes() -> None:
    made = configuration()
    assert (made[0], made[48:56].tolist(), made[16:32:2].tolist()) == (1, [16] * 8, [64] * 8)


def test_the_kernel_compiles_for_processors_with_tiles(tmp_path: Path) -> None:
    features = "+amx-tile,+amx-bf16,+avx2,+fma,+avx512f,+avx512bw,+avx512vl,+avx512dq"
    environment = os.environ | {
        "NUMBA_CPU_NAME": "sapphirerapids",
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    configurations, products, stores, releases = map(int, done.stdout.split())
    # LLVM unrolls the loops over channels. Two tiles of rows have four sums, and a single one has two.
    assert stores == 6
    assert min(configurations, products, releases) >= 1
