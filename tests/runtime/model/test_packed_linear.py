"""Packed matrices: the same results, stored once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_runtime.model.checkpoint import load_model
from megatron_runtime.model.layers import Linear
from megatron_runtime.model.packed_linear import PackedLinear, PanelLinear, can_pack, pack_linears

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not can_pack(torch.float32, CPU), reason="PyTorch was built without oneDNN")


@pytest.fixture
def linear() -> Linear:
    torch.manual_seed(0)
    made = Linear(48, 37, bias=True, dtype=torch.float32)
    for parameter in made.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    return made


@torch.inference_mode()
@pytest.mark.parametrize("rows", [0, 1, 2, 33])
def test_products_are_those_of_the_plain_matrix(linear: Linear, rows: int) -> None:
    inputs = torch.randn(rows, 48)
    packed = PackedLinear(linear.weight, linear.bias)
    torch.testing.assert_close(packed(inputs), linear(inputs))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "height"), [(576, 3072), (2048, 768), (768, 4096), (4096, 1024)])
def test_a_row_s_bits_depend_on_no_other_row(width: int, height: int, dtype: torch.dtype) -> None:
    if not can_pack(dtype, CPU):
        pytest.skip(f"this processor has no kernels for {dtype}")
    torch.manual_seed(0)
    packed = PackedLinear(torch.randn(height, width, dtype=dtype) * 0.1)
    inputs = torch.randn(200, width, dtype=dtype)
    alone = torch.cat([packed(row[None]) for row in inputs[:40]])
    for rows in (2, 31, 32, 33, 34, 65, 128, 200):
        together = packed(inputs[:rows])
        assert together.shape == (rows, height)
        assert torch.equal(together[:40], alone[:rows]), rows


def test_the_plain_matrix_can_be_had_back_bit_for_bit(linear: Linear) -> None:
    assert torch.equal(PackedLinear(linear.weight).weight, linear.weight)


def test_every_linear_is_replaced_wherever_it_sits(linear: Linear) -> None:
    tree = nn.ModuleList([linear, nn.ModuleList([Linear(4, 4, bias=False, dtype=torch.float32)]), nn.Identity()])
    pack_linears(tree)
    found = [module for module in tree.modules() if not isinstance(module, nn.ModuleList)]
    assert len(found) == 3
    assert all(isinstance(module, PackedLinear | PanelLinear) for module in found[:2])
    assert isinstance(found[2], nn.Identity)


def test_other_devices_and_types_are_not_changed() -> None:
    assert not can_pack(torch.float32, torch.device("meta"))
    assert not can_pack(torch.float64, CPU)


@pytest.mark.parametrize("tied", [True, False])
def test_a_loaded_decoder_holds_no_plain_matrix_but_the_embedding(tied: bool, tmp_path: Path, save_model: Any) -> None:
    model = save_model(tmp_path, "Llama", tie_word_embeddings=tied)
    decoder = load_model(tmp_path, dtype="float32")
    matrices = {id(parameter) for parameter in decoder.parameters() if parameter.dim() > 1}
    assert matrices == {id(decoder.embedding.table)}
    for name, tensor in decoder.destinations().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
