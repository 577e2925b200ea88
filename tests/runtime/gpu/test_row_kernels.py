"""Norms and activations in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from megatron_runtime.gpu import rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (3, 80), (2, 3, 100)], ids=str)
def test_a_norm_equals_that_of_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    given = (torch.randn(*shape, generator=generator) * 3).to(dtype)
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    wide = given.double()
    expected = weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    found = rows.rms_norm(given, weight, 1e-5)
    assert torch.allclose(found.double(), expected, rtol=1e-6 if dtype is torch.float32 else 2e-3, atol=1e-6)
    assert torch.equal(rows.rms_norm(given[:1], weight, 1e-5), found[:1])


def test_a_norm_of_a_view_of_some_heads_is_that_of_these_heads() -> None:
    heads = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(5))
    weight = torch.ones(16)
    assert torch.equal(rows.rms_norm(heads[:, 1:3], weight, 1e-6), rows.rms_norm(heads, weight, 1e-6)[:, 1:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [64, rows.GATE_BLOCK + 3])
def test_a_gate_equals_that_of_float64(size: int, dtype: torch.dtype) -> None:
    given = (torch.randn(2, 2 * size, generator=torch.Generator().manual_seed(5)) * 4).to(dtype)
    given[0, :2] = torch.tensor([-200.0, 200.0])
    gate, value = given.double().chunk(2, dim=1)
    expected = gate * gate.sigmoid() * value
    found = rows.gated_silu(given).double()
    assert torch.allclose(found, expected, rtol=2e-6 if dtype is torch.float32 else 3e-3, atol=1e-5)
