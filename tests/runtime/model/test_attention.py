"""Attention over blocks in any order equals a plain softmax over each context, with the same bits in every batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_runtime.model.attention import AttentionPlan
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.kernels.cpu_attention import CpuAttention
from megatron_runtime.model.kernels.torch_attention import TorchAttention
from megatron_runtime.model.rotary import rotate, rotation

KV_HEADS, HEADS, POOL = 2, 6, 60
HEAD_DIM = 64
"""The keys of prompts are transposed. NARROW ones are not, because they do not fill a vector."""
NARROW = 8

Cache = tuple[Tensor, Tensor]


@dataclass
class Request:
    """``new`` tokens at the end of a context, in separate blocks."""

    context: int
    new: int
    keys: Tensor
    values: Tensor
    queries: Tensor


def request(context: int, new: int, dtype: torch.dtype = torch.float32, width: int = HEAD_DIM) -> Request:
    keys, values = (torch.randn(context, KV_HEADS, width, dtype=dtype) for _ in range(2))
    return Request(context, new, keys, values, torch.randn(new, HEADS, width, dtype=dtype))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def threads() -> Iterator[None]:
    """More threads than usual, so that shares begin and end within a request."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def lay_out(requests: Sequence[Request], block_size: int, scattered: bool) -> tuple[ForwardBatch, Cache]:
    """The batch of all requests, and a pool with all tokens but the new ones, and NaN elsewhere."""
    free = iter(torch.randperm(POOL).tolist() if scattered else range(POOL))
    tables = [[next(free) for _ in range(-(-one.context // block_size))] for one in requests]
    width = max(map(len, tables))
    positions = torch.cat([torch.arange(one.context - one.new, one.context) for one in requests])
    owners = torch.repeat_interleave(torch.arange(len(requests)), torch.tensor([one.new for one in requests]))
    padded = torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32)
    shape = POOL, KV_HEADS, block_size, requests[0].keys.shape[-1]
    pools = [torch.full(shape, torch.nan, dtype=requests[0].keys.dtype) for _ in "kv"]
    for one, table in zip(requests, tables, strict=True):
        for position in range(one.context - one.new):
            block, offset = table[position // block_size], position % block_size
            for pool, known in zip(pools, (one.keys, one.values), strict=True):
                pool[block, :, offset] = known[position]
    batch = ForwardBatch(
        tokens=torch.zeros(len(positions), dtype=torch.long),
        positions=positions,
        slots=padded[owners, positions // block_size].long() * block_size + positions % block_size,
        query_starts=torch.tensor([0, *torch.tensor([one.new for one in requests]).cumsum(0)], dtype=torch.int32),
        context_lengths=torch.tensor([one.context for one in requests], dtype=torch.int32),
        block_tables=padded,
        logit_rows=torch.arange(len(requests)),
    )
    return batch, (pools[0], pools[1])


def attend(
    requests: Sequence[Request],
    *,
    block_size: int = 4,
    scattered: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    is_chunked: bool = False,
    kind: str = "cpu",
) -> list[Tensor]:
    """The attention output of each request's queries."""
    batch, cache = lay_out(requests, block_size, scattered)
    plan: AttentionPlan = CpuAttention(batch) if kind == "cpu" else TorchAttention(batch, block_size)
    if kind == "torch":
        cache = (cache[0].nan_to_num(), cache[1].nan_to_num())
    tokens = [torch.cat((one.queries, one.keys[-one.new :], one.values[-one.new :]), dim=1) for one in requests]
    seen = plan.attend(torch.cat(tokens), None, cache, window, soft_cap, sinks=sinks, is_chunked=is_chunked)
    return list(seen.split([one.new for one in requests]))


def plain(
    one: Request,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None = None,
    is_chunked: bool = False,
) -> Tensor:
    """The definition, in float64."""
    shape = (one.context, HEADS, one.keys.shape[-1])
    keys, values = (
        known.double().repeat_interleave(HEADS // KV_HEADS, dim=1).view(shape) for known in (one.keys, one.values)
    )
    scores = torch.einsum("qhd,khd->hqk", one.queries.double(), keys) / math.sqrt(shape[-1])
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    rows, columns = torch.arange(one.context - one.new, one.context)[:, None], torch.arange(one.context)
    reach = window or one.context
    hidden = (columns > rows) | (columns // reach < rows // reach if is_chunked else rows - columns >= reach)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, one.new, 1)), dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : one.context], values)


def mixed(dtype: torch.dtype = torch.float32, width: int = HEAD_DIM) -> list[Request]:
    """Decoding, whole prompts and later chunks of prompts, one longer than a chunk and a tile."""
    sizes = (11, 1), (1, 1), (9, 9), (100, 37), (70, 1), (20, 5)
    return [request(context, new, dtype, width) for context, new in sizes]


@pytest.mark.parametrize("kind", ["cpu", "torch"])
@pytest.mark.parametrize("window", [None, 1, 3, 65, 1000])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.usefixtures("threads")
def test_every_query_sees_its_own_context(
    kind: str, window: int | None, soft_cap: float | None, scattered: bool
) -> None:
    requests = mixed()
    seen = attend(requests, window=window, soft_cap=soft_cap, scattered=scattered, kind=kind)
    for one, rows in zip(requests, seen, strict=True):
        torch.testing.assert_close(rows.double(), plain(one, window, soft_cap), atol=2e-6, rtol=0)


SINKS = torch.linspace(-2.0, 4.0, HEADS)
VARIANTS: list[dict[str, Any]] = [
    {"sinks": SINKS},
    {"sinks": SINKS, "window": 7},
    {"sinks": SINKS, "window": 65, "soft_cap": 1.5},
    {"is_chunked": True, "window": 1},
    {"is_chunked": True, "window": 7},
    {"is_chunked": True, "window": 65, "sinks": SINKS},
    {"is_chunked": True},
]


@pytest.mark.parametrize("kind", ["cpu", "torch"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: " ".join(variant))
@pytest.mark.usefixtures("threads")
def test_sinks_take_a_share_and_chunks_end_the_context(kind: str, variant: dict[str, Any]) -> None:
    requests = mixed()
    variant = {"window": None, "soft_cap": None} | variant
    for one, rows in zip(requests, attend(requests, **variant, kind=kind), strict=True):
        torch.testing.assert_close(rows.double(), plain(one, **variant), atol=2e-6, rtol=0)


@pytest.mark.parametrize("kind", ["cpu", "torch"])
def test_bfloat16_is_as_exact_as_its_digits(kind: str) -> None:
    requests = mixed(torch.bfloat16)
    for one, rows in zip(requests, attend(requests, kind=kind), strict=True):
        assert rows.dtype is torch.bfloat16
        torch.testing.assert_close(rows.double(), plain(one, None, None), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", ["cpu", "torch"])
@pytest.mark.parametrize("channels", [HEAD_DIM, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_are_turned_on_the_way(kind: str, channels: int, dtype: torch.dtype) -> None:
    one = request(9, 9, dtype)
    batch, cache = lay_out([one], block_size=4, scattered=True)
    plan: AttentionPlan = CpuAttention(batch) if kind == "cpu" else TorchAttention(batch, 4)
    turns = rotation(batch.positions, torch.arange(1.0, channels / 2 + 1) / 10, dtype)
    seen = plan.attend(torch.cat((one.queries, one.keys, one.values), dim=1), turns, cache, None)
    wide = (turns[0].double(), turns[1].double())
    turned = Request(9, 9, rotate(one.keys.double(), *wide), one.values, rotate(one.queries.double(), *wide))
    close = {"atol": 2e-6, "rtol": 0} if dtype is torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    torch.testing.assert_close(seen.double(), plain(turned, None, None), **close)
    stored = cache[0][batch.slots // 4, :, batch.slots % 4]
    torch.testing.assert_close(stored.double(), turned.keys, **close)


@pytest.mark.parametrize(
    "variant",
    [{}, {"window": 7}, {"window": 66}, {"window": 66, "sinks": SINKS}, {"window": 66, "is_chunked": True}],
    ids=lambda variant: " ".join(variant) or "all",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [HEAD_DIM, NARROW])
def test_a_query_sees_the_same_bits_however_its_request_is_served(
    variant: dict[str, Any], dtype: torch.dtype, width: int
) -> None:
    requests = mixed(dtype, width)
    together = attend(requests, **variant)
    for one, rows in zip(requests, together, strict=True):
        assert torch.equal(attend([one], **variant, block_size=16)[0], rows), "alone, in blocks of another size"
        last = Request(one.context, 1, one.keys, one.values, one.queries[-1:])
        assert torch.equal(attend([last], **variant)[0], rows[-1:]), "its last token on its own"


@pytest.mark.usefixtures("threads")
def test_a_query_sees_the_same_bits_on_any_number_of_threads() -> None:
    requests = mixed()
    on_three = attend(requests)
    torch.set_num_threads(1)
    assert all(map(torch.equal, attend(requests), on_three))


def test_values_that_are_not_finite_stay_with_their_request() -> None:
    requests = mixed()
    requests[0].values[3] = torch.nan
    requests[3].keys[5] = torch.nan
    seen = attend(requests)
    assert [bool(rows.isnan().all()) for rows in seen] == [True, False, False, True, False, False]
    assert all(rows.isfinite().all() for rows in (seen[1], seen[2], seen[4], seen[5]))


@pytest.mark.parametrize("width", [HEAD_DIM, NARROW])
def test_keys_and_values_that_are_not_finite_change_no_earlier_query(width: int) -> None:
    requests = [request(100, 100, width=width)]
    expected = attend(requests)[0]
    requests[0].keys[70], requests[0].values[71] = torch.nan, torch.inf
    seen = attend(requests)[0]
    assert torch.equal(seen[:70], expected[:70])
    assert seen[70].isnan().all()
    assert not seen[71:].isfinite().any()


def test_scores_far_apart_do_not_overflow() -> None:
    one = request(80, 2)
    one.queries *= 1e4
    torch.testing.assert_close(attend([one])[0].double(), plain(one, None, None), atol=1e-5, rtol=1e-5)
