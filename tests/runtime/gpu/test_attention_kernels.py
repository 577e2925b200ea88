"""Attention over a paged cache in Triton's interpreter, against float64.

bfloat16 is not tested here: the interpreter multiplies its bits as if they were integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from gpu_support.paged import PagedCase

from megatron_runtime.gpu import attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@dataclass(frozen=True)
class Shape:
    """Sizes of a case: contexts with their new tokens, heads on key heads, width and tokens of a block."""

    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int]
    width: int
    page: int
    window: int | None = None
    soft_cap: float | None = None
    turned: int | None = None
    """Rotated channels; None: all."""
    has_sinks: bool = False
    is_chunked: bool = False

    @property
    def sinks(self) -> torch.Tensor | None:
        """Of each query head, some of which take most of the softmax."""
        return torch.linspace(-3.0, 5.0, self.heads[0]) if self.has_sinks else None


DECODE = ((1, 1), (17, 1), (70, 1))
MIXED = ((40, 1), (33, 20), (5, 5))
SHAPES = {
    "single tokens": Shape(DECODE, (4, 2), 64, 16),
    "single tokens, group of 3, width 80": Shape(DECODE, (6, 2), 80, 16),
    "single tokens, window within a split": Shape(((90, 1), (20, 1)), (2, 2), 96, 32, window=33),
    "prompts alone": Shape(((19, 19), (70, 37)), (4, 4), 64, 16),
    "prompts and single tokens": Shape(MIXED, (4, 2), 128, 16),
    "windows": Shape(((70, 1), (66, 20)), (8, 1), 64, 16, window=13),
    "soft cap": Shape(MIXED, (2, 1), 32, 64, soft_cap=5.0),
    "soft cap and window": Shape(((75, 1), (40, 9)), (2, 1), 32, 256, window=20, soft_cap=5.0),
    "width 256": Shape(((20, 1), (9, 9)), (2, 1), 256, 16),
    "half of the channels rotated": Shape(MIXED, (2, 1), 64, 8, turned=32),
    "sinks": Shape(MIXED, (6, 2), 64, 16, has_sinks=True),
    "sinks and windows": Shape(((70, 1), (66, 20), (3, 1)), (4, 2), 64, 16, window=13, has_sinks=True),
    "chunks": Shape(((70, 1), (66, 20), (65, 1), (40, 40)), (4, 2), 64, 16, window=13, is_chunked=True),
    "chunks and sinks": Shape(((64, 1), (70, 37)), (4, 2), 64, 16, window=32, is_chunked=True, has_sinks=True),
    "none rotated": Shape(((3, 1), (9, 4)), (2, 1), 64, 8, turned=0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_equals_that_of_float64(shape: Shape, dtype: torch.dtype) -> None:
    case = PagedCase.random(shape.lengths, shape.heads, shape.width, shape.page, dtype, turned=shape.turned)
    before = [array.clone() for array in case.cache]
    scoring = (shape.window, shape.soft_cap, shape.sinks, shape.is_chunked)
    seen = case.attend(*scoring)
    case.check_cache(before)
    expected = case.expected(*scoring)
    assert seen.isfinite().all()
    error = (seen.double() - expected).norm() / expected.norm()
    assert error < (5e-6 if dtype is torch.float32 else 1e-3)


@pytest.mark.parametrize(
    ("window", "sinks", "is_chunked"),
    [(None, None, False), (600, None, False), (None, torch.tensor([1.0, 6.0]), False), (700, None, True)],
    ids=["all", "window", "sinks", "chunks"],
)
def test_contexts_of_several_splits_are_merged(
    window: int | None, sinks: torch.Tensor | None, is_chunked: bool
) -> None:
    lengths = ((attention.SPLIT, 1), (attention.SPLIT + 1, 1), (2 * attention.SPLIT + 100, 1), (3, 1))
    case = PagedCase.random(lengths, (2, 1), 64, 128, torch.float32)
    seen, expected = (compute(window, None, sinks, is_chunked) for compute in (case.attend, case.expected))
    assert (seen.double() - expected).norm() / expected.norm() < 5e-6


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
