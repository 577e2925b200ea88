"""One new token per request over blocks in any order: what a plain softmax over the whole context gives."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.paged_decode import PagedDecode

BLOCK, KV_HEADS, HEADS, HEAD_DIM, POOL = 4, 2, 6, 8, 40

Cache = tuple[Tensor, Tensor]

TABLES = {
    "blocks side by side": [[0, 1, 2], [3], [4, 5]],
    "blocks in any order": [[5, 1, 2], [3], [0, 4]],
    "blocks all over the pool": [[39, 1, 17], [30], [8, 4]],
    "blocks that two share": [[0, 1, 2], [3], [0, 1]],
    "blocks that nobody wants between": [[1, 2, 4], [7], [5, 8]],
}
LENGTHS = [11, 1, 8]


@pytest.fixture
def cache() -> Cache:
    torch.manual_seed(0)
    shape = (POOL, KV_HEADS, BLOCK, HEAD_DIM)
    return torch.randn(shape), torch.randn(shape)


def decode(tables: Sequence[Sequence[int]], lengths: Sequence[int]) -> PagedDecode:
    """A batch of decoding requests alone."""
    count, width = len(tables), max(map(len, tables))
    batch = ForwardBatch(
        tokens=torch.zeros(count, dtype=torch.long),
        positions=torch.tensor(lengths) - 1,
        slots=torch.zeros(count, dtype=torch.long),
        query_starts=torch.arange(count + 1, dtype=torch.int32),
        context_lengths=torch.tensor(lengths, dtype=torch.int32),
        block_tables=torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32),
        logit_rows=torch.arange(count),
    )
    return PagedDecode(batch, list(range(count)), BLOCK)


def plain(query: Tensor, cache: Cache, table: Sequence[int], length: int, window: int | None) -> Tensor:
    """One request, by the definition: [heads, head_dim]."""
    start = 0 if window is None else max(length - window, 0)
    keys, values = (stored[list(table)].transpose(0, 1).flatten(1, 2)[:, start:length] for stored in cache)
    grouped = query.view(KV_HEADS, -1, HEAD_DIM)
    shares = (grouped @ keys.transpose(1, 2) / math.sqrt(HEAD_DIM)).softmax(-1)
    return (shares @ values).view(HEADS, HEAD_DIM)


@pytest.mark.parametrize("window", [None, 1, 3, 5, 100])
@pytest.mark.parametrize("name", TABLES)
def test_every_request_sees_its_own_context(name: str, window: int | None, cache: Cache) -> None:
    tables = TABLES[name]
    queries = torch.randn(len(tables), HEADS, HEAD_DIM)
    seen = decode(tables, LENGTHS).attend(queries, cache, window)
    for row, (table, length) in enumerate(zip(tables, LENGTHS, strict=True)):
        torch.testing.assert_close(seen[row], plain(queries[row], cache, table, length, window))


@pytest.mark.parametrize("name", TABLES)
def test_a_request_sees_the_same_bits_alone_as_beside_others(name: str, cache: Cache) -> None:
    tables = TABLES[name]
    queries = torch.randn(len(tables), HEADS, HEAD_DIM)
    together = decode(tables, LENGTHS).attend(queries, cache, None)
    for row, (table, length) in enumerate(zip(tables, LENGTHS, strict=True)):
        assert torch.equal(decode([table], [length]).attend(queries[row : row + 1], cache, None)[0], together[row])


def test_values_that_are_not_finite_stay_with_their_request(cache: Cache) -> None:
    tables = TABLES["blocks in any order"]
    cache[1][0] = torch.nan
    seen = decode(tables, LENGTHS).attend(torch.randn(3, HEADS, HEAD_DIM), cache, None)
    assert seen[:2].isfinite().all()
    assert seen[2].isnan().all()
