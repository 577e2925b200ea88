"""Attention over a paged cache in Triton's interpreter, against float64.

bfloat16 is not tested here: the interpreter multiplies its bits as if they were integers.
"""

from __future__ import annotations

import pytest
import torch
from gpu_support.attention_shapes import MIXED, SHAPES, Shape
from gpu_support.paged import PagedCase

from megatron_runtime.gpu import attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")


LIMITS = {torch.float32: 5e-6, torch.float16: 1e-3}


def check_attention(shape: Shape, dtype: torch.dtype) -> None:
    """Compare outputs and cache with those of float64."""
    case, limits = shape.case(dtype), shape.limits()
    before = [array.clone() for array in case.cache]
    seen = case.attend(*limits)
    case.check_cache(before)
    expected = case.expected(*limits)
    assert seen.isfinite().all()
    assert (seen.double() - expected).norm() / expected.norm() < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_equals_that_of_float64(shape: Shape, dtype: torch.dtype) -> None:
    check_attention(shape, dtype)


@pytest.mark.parametrize("name", ["prompts and single tokens", "soft cap and window", "chunks and sinks"])
def test_attention_equals_that_of_float64_with_the_tiles_of_ampere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention.tile_sizes(80, 64, 2) != attention.tile_sizes(90, 64, 2)
    monkeypatch.setattr("megatron_runtime.gpu.launch._capability", lambda _: 80)
    check_attention(SHAPES[name], torch.float16)


@pytest.mark.parametrize("window", [None, 50, 100])
def test_long_contexts_have_longer_splits(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five times the tokens that the usual splits reach, beside contexts with one and with all of the usual ones."""
    monkeypatch.setattr(attention, "SPLIT", 32)
    monkeypatch.setattr(attention, "MOST_SPLITS", 3)
    lengths = ((3 * 32 * 5, 1), (3 * 32, 1), (3 * 32 + 1, 1), (3, 1))
    case = PagedCase.random(lengths, (2, 1), 64, 16, torch.float32)
    seen, expected = case.attend(window, None), case.expected(window, None)
    assert (seen.double() - expected).norm() / expected.norm() < 5e-6


def test_tokens_and_requests_of_padding_change_nothing_and_have_no_output() -> None:
    """As in CUDA graphs: tokens without a request, which are not stored, and requests without a token."""
    case = PagedCase.random(MIXED, (4, 2), 64, 16, torch.float32, turned=0)
    expected, count = case.attend(None, None), len(case.slots)
    cache = (case.cache[0].clone(), case.cache[1].clone())
    slots = torch.cat((case.slots, torch.full((7,), -1)))
    starts = torch.cat((case.query_starts, torch.full((3,), count, dtype=torch.int32)))
    lengths = torch.tensor([*(length for length, _ in MIXED), 1, 1, 1], dtype=torch.int32)
    tables = torch.cat((case.tables, torch.zeros(3, case.tables.shape[1], dtype=torch.int32)))
    batch = attention.PagedBatch(slots, starts, lengths, tables)
    heads = torch.cat((case.heads, torch.randn(7, *case.heads.shape[1:])))
    found = attention.attend(heads, None, cache, batch, None, None)
    assert torch.equal(found[:count], expected)
    assert torch.equal(found[count:], torch.zeros(7, 4, 64))
    for array, before in zip(cache, case.cache, strict=True):
        assert torch.equal(array.nan_to_num(9), before.nan_to_num(9))


def test_the_bits_of_a_request_do_not_depend_on_its_batch() -> None:
    """Alone, beside a context with more splits, and beside prompts."""
    alone = PagedCase.random(((90, 1),), (4, 2), 64, 16, torch.float16)
    longer = PagedCase.random(((90, 1), (attention.SPLIT + 9, 1)), (4, 2), 64, 16, torch.float16)
    mixed = PagedCase.random(((90, 1), (7, 7)), (4, 2), 64, 16, torch.float16)
    bits = [part.with_first_of(alone).attend(None, None)[:1] for part in (alone, longer, mixed)]
    assert torch.equal(bits[0], bits[1])
    assert torch.equal(bits[0], bits[2])


@pytest.mark.usefixtures("exact_products")
def test_the_bits_of_a_prompt_do_not_depend_on_its_chunks() -> None:
    whole = PagedCase.random(((90, 90),), (4, 2), 64, 16, torch.float32)
    expected = whole.attend(50, None)
    pieces, done = [], 0
    for size in (40, 13, 37):
        pieces.append(whole.piece(done, size).attend(50, None))
        done += size
    assert torch.equal(torch.cat(pieces), expected)


def test_padding_is_neither_stored_nor_attended() -> None:
    case = PagedCase.random(((20, 1), (9, 1)), (2, 1), 64, 16, torch.float32)
    expected = case.attend(None, None)
    before = [array.clone() for array in case.cache]
    padded = case.padded(rows=2)
    seen = padded.attend(None, None)
    assert torch.equal(seen[:2], expected)
    for array, old in zip(padded.cache, before, strict=True):
        assert torch.equal(array[1:].nan_to_num(9), old[1:].nan_to_num(9))
        assert not array[0].any()
