"""Norms, activations, embeddings and rotations in Triton's interpreter, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_runtime.gpu import rows
from megatron_runtime.model.rotary import rotation

KINDS = pytest.mark.parametrize("kind", rows.NORMS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


def random(*shape: int, seed: int = 5, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def expected_norm(given: Tensor, weight: Tensor, bias: Tensor, kind: str) -> Tensor:
    """In float64."""
    wide, factor = given.double(), weight.double()
    if kind == "layer":
        return functional.layer_norm(wide, weight.shape, factor, bias.double(), 1e-5)
    factor = 1 + factor if kind == "rms_plus_one" else factor
    return factor * wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()


@DTYPES
@KINDS
@pytest.mark.parametrize("shape", [(1, 64), (2, 3, 100)], ids=str)
def test_a_norm_equals_that_of_float64(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    given = (random(*shape, scale=3) + 1).to(dtype)
    weight, bias = random(shape[-1], seed=6).to(dtype), random(shape[-1], seed=7).to(dtype)
    found = rows.normalize(given, weight, bias, 1e-5, kind)
    tolerance = {"rtol": 1e-6, "atol": 2e-6} if dtype is torch.float32 else {"rtol": 2e-3, "atol": 2e-3}
    assert torch.allclose(found.double(), expected_norm(given, weight, bias, kind), **tolerance)
    assert torch.equal(rows.normalize(given[:1], weight, bias, 1e-5, kind), found[:1])


@DTYPES
@KINDS
def test_a_sum_and_its_norm_have_the_bits_of_two_operations(kind: str, dtype: torch.dtype) -> None:
    given, update = random(3, 80).to(dtype), random(3, 80, seed=6).to(dtype)
    weight, bias = random(80, seed=7).to(dtype), random(80, seed=8).to(dtype)
    for multiplier in (1.0, 0.22):
        summed, normed = rows.add_and_normalize(given, update, multiplier, weight, bias, 1e-5, kind)
        assert torch.equal(summed, (given.float() + multiplier * update.float()).to(dtype))
        assert torch.equal(normed, rows.normalize(summed, weight, bias, 1e-5, kind))


def test_a_norm_of_a_view_of_some_heads_is_that_of_these_heads() -> None:
    heads, weight = random(2, 5, 16), torch.ones(16)
    part, whole = (rows.normalize(each, weight, None, 1e-6, "rms") for each in (heads[:, 1:3], heads))
    assert torch.equal(part, whole[:, 1:3])


@DTYPES
@pytest.mark.parametrize("kind", ["rms", "rms_plus_one"])
def test_queries_and_keys_have_the_norms_of_single_rows(kind: str, dtype: torch.dtype) -> None:
    """And the values stay."""
    heads, weights = random(3, 14, 24).to(dtype), (random(24, seed=6).to(dtype), random(24, seed=7).to(dtype))
    queries, keys, values = heads.clone().split((9, 3, 2), dim=1)
    rows.normalize_heads_(heads, (9, 3), weights, 1e-5, kind)
    normed = [
        rows.normalize(part, weight, None, 1e-5, kind) for part, weight in zip((queries, keys), weights, strict=True)
    ]
    tolerance = 1e-6 if dtype is torch.float32 else 2e-3
    assert torch.allclose(heads, torch.cat((*normed, values), 1), rtol=tolerance, atol=tolerance)


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda gate: functional.gelu(gate, approximate="tanh"),
}


@DTYPES
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("size", [64, rows.GATE_BLOCK + 3])
def test_a_gate_equals_that_of_float64(size: int, activation: str, dtype: torch.dtype) -> None:
    given = random(2, 2 * size, scale=4).to(dtype)
    given[0, :2] = torch.tensor([-200.0, 200.0])
    gate, value = given.double().chunk(2, dim=1)
    found = rows.gated(given, activation).double()
    rtol = 2e-6 if dtype is torch.float32 else 3e-3
    assert torch.allclose(found, GATES[activation](gate) * value, rtol=rtol, atol=1e-5)


@DTYPES
@pytest.mark.parametrize("first", [0, 10])
def test_rows_of_a_table_are_looked_up_and_scaled(first: int, dtype: torch.dtype) -> None:
    """Those of other ranks are zeros."""
    table, learned = random(20, 70).to(dtype), random(6, 70, seed=6).to(dtype)
    tokens, positions = torch.tensor([10, 29, 12, 3, 31]), torch.tensor([5, 0, 1, 1, 2])
    here = (tokens >= first) & (tokens < first + 20)
    plain = torch.where(here[:, None], table[(tokens - first).clamp(0, 19)], 0)
    assert torch.equal(rows.look_up(tokens, table, first, 1.0, None), plain)
    scaled = (plain.float() * 8.5).to(dtype)
    assert torch.equal(rows.look_up(tokens, table, first, 8.5, None), scaled)
    summed = (scaled.float() + learned[positions].float()).to(dtype)
    assert torch.equal(rows.look_up(tokens, table, first, 8.5, (learned, positions)), summed)


@DTYPES
def test_rotations_are_those_of_the_host(dtype: torch.dtype) -> None:
    positions, frequencies = torch.tensor([0, 1, 77, 131071]), torch.tensor([1.0, 0.3, 1e-4])
    found, expected = (make(positions, frequencies, dtype, 1.3) for make in (rows.rotation, rotation))
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=0, atol=1e-6 if dtype is torch.float32 else 1e-3)
