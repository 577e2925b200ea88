"""The parts of multi-head latent attention: values within keys, and the products that queries and values need."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_runtime.model.attention import AttentionPlan
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.kernels.cpu_attention import HEADS_TOGETHER, CpuAttention
from megatron_runtime.model.kernels.latent_products import TILE, absorb, expand
from megatron_runtime.model.kernels.torch_attention import TorchAttention
from megatron_runtime.model.packed_linear import can_pack, pack_linear
from megatron_runtime.model.rotary import rotate, rotation

ROTATED, RANK, BLOCK = 4, 12, 4
CLOSE = {
    torch.float32: {"atol": 2e-6, "rtol": 2e-6},
    torch.bfloat16: {"atol": 3e-2, "rtol": 3e-2},
    torch.float64: {"atol": 1e-9, "rtol": 1e-9},
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def attend(
    rows: Tensor, context: int, *, kind: str, known: Tensor | None = None, soft_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The attention output of the last ``len(rows)`` tokens of a context, and the pool; ``known`` are the keys before
    them.
    """
    new, blocks = len(rows), -(-context // BLOCK)
    positions = torch.arange(context - new, context)
    table = torch.randperm(blocks + 3)[:blocks]
    batch = ForwardBatch(
        tokens=torch.zeros(new, dtype=torch.long),
        positions=positions,
        slots=table[positions // BLOCK] * BLOCK + positions % BLOCK,
        query_starts=torch.tensor([0, new], dtype=torch.int32),
        context_lengths=torch.tensor([context], dtype=torch.int32),
        block_tables=table[None].int(),
        logit_rows=torch.arange(new),
    )
    pool = torch.zeros(blocks + 3, 1, BLOCK, ROTATED + RANK, dtype=rows.dtype)
    for position in range(context - new):
        assert known is not None
        pool[table[position // BLOCK], 0, position % BLOCK] = known[position]
    plan: AttentionPlan = CpuAttention(batch) if kind == "cpu" else TorchAttention(batch, BLOCK)
    turns = rotation(positions, torch.tensor([1.0, 0.1]), rows.dtype)
    return plan.attend(rows, turns, (pool,), None, soft_cap, value_width=RANK), pool[table].flatten(0, 2)[:context]


def plain(rows: Tensor, keys: Tensor, soft_cap: float | None) -> Tensor:
    """The definition, in float64: ``keys`` are rotated, and contain the values; ``rows`` are not rotated yet."""
    context, new = len(keys), len(rows)
    positions = torch.arange(context - new, context)
    queries = rotate(rows[:, :-1].double(), *rotation(positions, torch.tensor([1.0, 0.1]), torch.float64))
    scores = torch.einsum("qhd,kd->hqk", queries, keys.double()) / math.sqrt(ROTATED + RANK)
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    scores = scores.masked_fill(positions[:, None] < torch.arange(context), -torch.inf)
    return torch.einsum("hqk,kd->qhd", scores.softmax(-1), keys[:, ROTATED:].double())


@pytest.mark.parametrize("kind", ["cpu", "torch"])
@pytest.mark.parametrize("heads", [1, 5, HEADS_TOGETHER + 1, 3 * HEADS_TOGETHER])
@pytest.mark.parametrize(("new", "context"), [(70, 70), (5, 20), (1, 90), (1, 1)])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_values_are_the_ends_of_the_keys(kind: str, heads: int, new: int, context: int, soft_cap: float | None) -> None:
    known, rows = torch.randn(context, ROTATED + RANK), torch.randn(new, heads + 1, ROTATED + RANK)
    seen, keys = attend(rows, context, kind=kind, known=known, soft_cap=soft_cap)
    assert seen.shape == (new, heads, RANK)
    torch.testing.assert_close(seen.double(), plain(rows, keys, soft_cap), **CLOSE[torch.float32])
    turns = rotation(torch.arange(context - new, context), torch.tensor([1.0, 0.1]), torch.float32)
    torch.testing.assert_close(keys[context - new :], rotate(rows[:, -1:], *turns)[:, 0])
    torch.testing.assert_close(keys[: context - new], known[: context - new])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_has_the_same_bits_in_a_prefill_and_alone(dtype: torch.dtype) -> None:
    rows = torch.randn(70, 2 * HEADS_TOGETHER + 1, ROTATED + RANK, dtype=dtype)
    together, keys = attend(rows, 70, kind="cpu")
    for position in (0, 17, 69):
        alone, _ = attend(rows[position : position + 1], position + 1, kind="cpu", known=keys)
        assert torch.equal(alone[0], together[position])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_absorbing_and_expanding_are_the_products_of_each_head(dtype: torch.dtype) -> None:
    heads, width, value_width, tokens = 3, 6, 5, 2 * TILE + 3
    queries = torch.randn(tokens, heads, width + ROTATED, dtype=dtype)
    up = torch.randn(heads, width + value_width, RANK, dtype=dtype)
    latents = torch.full((tokens, heads + 1, ROTATED + RANK), 7.0, dtype=dtype)
    absorb(queries, up, latents, 0.5)
    expected = 0.5 * torch.einsum("thn,hnr->thr", queries[..., :width].double(), up[:, :width].double())
    torch.testing.assert_close(latents[:, :heads, ROTATED:].double(), expected, **CLOSE[dtype])
    assert (latents[:, :, :ROTATED] == 7.0).all()
    assert (latents[:, heads] == 7.0).all()
    seen = torch.randn(tokens, heads, RANK, dtype=dtype)
    values = torch.einsum("thr,hvr->thv", seen.double(), up[:, width:].double())
    torch.testing.assert_close(expand(seen, up, value_width).double(), values, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_products_have_the_same_bits_beside_any_number_of_rows(dtype: torch.dtype) -> None:
    heads, width, rank, tokens = 2, 128, 512, 3 * TILE + 1
    queries = torch.randn(tokens, heads, width + ROTATED, dtype=dtype)
    up = torch.randn(heads, 2 * width, rank, dtype=dtype)
    together = torch.zeros(tokens, heads + 1, ROTATED + rank, dtype=dtype)
    absorb(queries, up, together)
    values = expand(together[:, :heads, ROTATED:].contiguous(), up, width)
    for row in range(tokens):
        alone = torch.zeros(1, heads + 1, ROTATED + rank, dtype=dtype)
        absorb(queries[row : row + 1], up, alone)
        assert torch.equal(alone[0], together[row])
        assert torch.equal(expand(alone[:, :heads, ROTATED:].contiguous(), up, width)[0], values[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("hidden", "queries", "keys"), [(32, 16, 40), (320, 128, 72), (1024, 512, 576)])
def test_one_projection_to_all_latents_has_the_bits_of_two(
    dtype: torch.dtype, hidden: int, queries: int, keys: int
) -> None:
    """Of packed matrices, as CPUs have them."""
    if not can_pack(dtype, torch.device("cpu")):
        pytest.skip("oneDNN can't pack matrices of this type here")
    parts = [(torch.randn(rows, hidden) / math.sqrt(hidden)).to(dtype) for rows in (queries, keys)]
    one, *two = (pack_linear(matrix) for matrix in (torch.cat(parts), *parts))
    for tokens in (1, 2, 17, 70):
        inputs = torch.randn(tokens, hidden).to(dtype)
        assert torch.equal(one(inputs), torch.cat([each(inputs) for each in two], 1))
