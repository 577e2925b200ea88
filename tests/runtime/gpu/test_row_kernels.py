"""Norms, activations, embeddings and rotations in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from gpu_support.row_references import ACTIVATIONS, clamped_gate, norm_of
from torch import Tensor

from megatron_runtime.gpu import rows
from megatron_runtime.model.rotary import rotation

pytestmark = pytest.mark.usefixtures("poisoned_memory")

KINDS = pytest.mark.parametrize("kind", rows.NORMS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


def random(*shape: int, seed: int = 5, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@DTYPES
@KINDS
@pytest.mark.parametrize("shape", [(1, 64), (2, 3, 100)], ids=str)
def test_a_norm_equals_that_of_float64(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    given = (random(*shape, scale=3) + 1).to(dtype)
    weight, bias = random(shape[-1], seed=6).to(dtype), random(shape[-1], seed=7).to(dtype)
    found = rows.normalize(given, weight, bias, 1e-5, kind)
    tolerance = {"rtol": 1e-6, "atol": 2e-6} if dtype is torch.float32 else {"rtol": 2e-3, "atol": 2e-3}
    assert torch.allclose(found.double(), norm_of(given, weight, bias, kind), **tolerance)
    assert torch.equal(rows.normalize(given[:1], weight, bias, 1e-5, kind), found[:1])


@KINDS
def test_a_norm_reads_parts_of_wider_rows_without_a_copy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wide, weight, bias = random(3, 100), random(64, seed=6), random(64, seed=7)
    part = wide[:, 20:84]
    expected = rows.normalize(part.clone(), weight, bias, 1e-5, kind)
    monkeypatch.setattr(torch.Tensor, "contiguous", None)
    found = rows.normalize(part, weight, bias, 1e-5, kind)
    assert torch.equal(found, expected)
    assert found.shape == (3, 64)


@DTYPES
@KINDS
def test_a_sum_and_its_norm_have_the_bits_of_two_operations(kind: str, dtype: torch.dtype) -> None:
    given, update = random(3, 80).to(dtype), random(3, 80, seed=6).to(dtype)
    weight, bias = random(80, seed=7).to(dtype), random(80, seed=8).to(dtype)
    for multiplier in (1.0, 0.22):
        summed, normed = rows.add_and_normalize(given, update, multiplier, weight, bias, 1e-5, kind)
        assert torch.equal(summed, (given.float() + multiplier * update.float()).to(dtype))
        assert torch.equal(normed, rows.normalize(summed, weight, bias, 1e-5, kind))


@DTYPES
@KINDS
def test_a_sum_with_a_norm_has_the_bits_of_two_operations(kind: str, dtype: torch.dtype) -> None:
    """Alone, and with the norm of the sum."""
    given, update = random(3, 80).to(dtype), random(3, 80, seed=6, scale=3).to(dtype)
    of_sum, of_update = ((random(80, seed=seed).to(dtype), random(80, seed=seed + 1).to(dtype)) for seed in (7, 9))
    normed = rows.normalize(update, *of_update, 1e-5, kind)
    for multiplier in (1.0, 0.22):
        expected = rows.add_and_normalize(given, normed, multiplier, *of_sum, 1e-5, kind)
        found = rows.add_and_normalize(given, update, multiplier, *of_sum, 1e-5, kind, of_update)
        assert all(map(torch.equal, found, expected))
        assert torch.equal(rows.add_normalized(given, update, multiplier, *of_update, 1e-5, kind), expected[0])


@DTYPES
@pytest.mark.parametrize("kind", ["rms", "rms_plus_one"])
def test_projections_have_the_norms_of_single_rows(kind: str, dtype: torch.dtype) -> None:
    """Of all queries and of all keys together; and the values stay."""
    given, weights = random(3, 100).to(dtype), (random(60, seed=6).to(dtype), random(24, seed=7).to(dtype))
    queries, keys, values = given.clone().split((60, 24, 16), dim=1)
    rows.normalize_projections_(given, (60, 24), weights, 1e-5, kind)
    found = given.split((60, 24, 16), dim=1)
    tolerance = {"rtol": 1e-6, "atol": 2e-6} if dtype is torch.float32 else {"rtol": 2e-3, "atol": 2e-3}
    for part, normed, weight in zip((queries, keys), found, weights, strict=False):
        assert torch.allclose(normed.double(), norm_of(part, weight, weight, kind), **tolerance)
        assert torch.equal(normed, rows.normalize(part, weight, None, 1e-5, kind))
    assert torch.equal(found[2], values)


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


@DTYPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [64, rows.GATE_BLOCK + 3])
def test_a_gate_equals_that_of_float64(size: int, activation: str, dtype: torch.dtype) -> None:
    given = random(2, 2 * size, scale=4).to(dtype)
    given[0, :2] = torch.tensor([-200.0, 200.0])
    gate, value = given.double().chunk(2, dim=1)
    found = rows.gated(given, activation).double()
    rtol = 2e-6 if dtype is torch.float32 else 3e-3
    # 200 * 200 times a value is infinite in float16.
    expected = (ACTIVATIONS[activation](gate) * value).to(dtype).double()
    assert torch.allclose(found, expected, rtol=rtol, atol=1e-5)


@DTYPES
@pytest.mark.parametrize("size", [64, rows.GATE_BLOCK + 3])
def test_a_clamped_gate_equals_that_of_float64(size: int, dtype: torch.dtype) -> None:
    """And has the values at its limits, and NaN of NaN."""
    given, (alpha, limit) = random(3, 2 * size, scale=4).to(dtype), (1.7, 3.0)
    given[0, :3] = torch.tensor([-200.0, 200.0, torch.nan])
    given[1, size : size + 3] = torch.tensor([-200.0, 200.0, torch.nan])
    gate, value = given.double().chunk(2, dim=1)
    expected = clamped_gate(gate, value, alpha, limit)
    rtol = 2e-6 if dtype is torch.float32 else 4e-3
    found = rows.gated(given, "silu", (alpha, limit)).double()
    assert torch.allclose(found, expected, rtol=rtol, atol=1e-5, equal_nan=True)
    assert found.isnan().sum() == 2


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


@pytest.mark.parametrize("count", [1, rows.TOKEN_BLOCK + 3])
def test_tokens_are_those_of_the_last_pass_where_they_have_a_place_there(count: int) -> None:
    generator = torch.Generator().manual_seed(3)
    sampled, known = torch.arange(100, 107), torch.arange(count)
    sources = torch.randint(-2, len(sampled), (count,), generator=generator)
    expected = torch.where(sources >= 0, sampled[sources.clamp(min=0)], known)
    assert torch.equal(rows.sampled_or_known(known, sources, sampled), expected)
    assert torch.equal(rows.sampled_or_known(known, torch.full_like(known, -1), sampled), known)


@DTYPES
def test_rotations_are_those_of_the_host(dtype: torch.dtype) -> None:
    positions, frequencies = torch.tensor([0, 1, 77, 131071]), torch.tensor([1.0, 0.3, 1e-4])
    found, expected = (make(positions, frequencies, dtype, 1.3) for make in (rows.rotation, rotation))
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=0, atol=1e-6 if dtype is torch.float32 else 1e-3)
