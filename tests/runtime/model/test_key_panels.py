"""Scores of many queries with transposed keys have the bits of those without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llvmlite import ir
from numba import njit

from megatron_runtime.cpu_features import has_wide_vectors
from megatron_runtime.model.kernels import attention_instructions, key_panels
from megatron_runtime.model.kernels.attention_instructions import TOGETHER, score_keys
from megatron_runtime.model.kernels.key_panels import can_transpose, prepare_queries, score_panel, transpose_keys
from megatron_runtime.model.kernels.vector_instructions import LANES, PairDot, constant, floats, fused

pytestmark = pytest.mark.skipif(not has_wide_vectors(), reason="this processor has no AVX-512")

COLUMNS, QUERIES = 64, 10
SCALE = np.float32(0.25)


def scorers(width: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The scores of queries with keys of this width: without a panel, and with one from a first key on."""

    @njit
    def directly(queries: Any, keys: Any) -> Any:
        scores = np.empty((len(queries), COLUMNS), np.float32)
        for query in range(len(queries)):
            given, key, to = queries[query].ctypes.data, keys.ctypes.data, scores[query].ctypes.data
            score_keys(keys, 1, width, given, key, len(keys), to, COLUMNS, SCALE, key)
        return scores[:, : len(keys)]

    @njit
    def with_panel(queries: Any, keys: Any, first: int) -> Any:
        scores = np.empty((len(queries) + TOGETHER - 1, COLUMNS), np.float32)
        words = np.zeros((len(queries) + TOGETHER - 1, width), np.float32)
        panel, places = np.full((width, COLUMNS), np.nan, np.float32), np.empty(COLUMNS, np.int64)
        for index in range(COLUMNS):
            places[index] = keys[min(index, len(keys) - 1)].ctypes.data
        transpose_keys(keys, width, places.ctypes.data, len(keys), COLUMNS, panel.ctypes.data, 0)
        prepare_queries(keys, width, len(queries), queries.ctypes.data, words.ctypes.data)
        by = panel.ctypes.data
        for query in range(0, len(queries), TOGETHER):
            to = scores[query:].ctypes.data
            score_panel(keys, query, width, words.ctypes.data, by, first, len(keys), to, COLUMNS, SCALE)
        return scores[: len(queries), first : len(keys)]

    return directly, with_panel


def add_pairs(_: PairDot, builder: Any, sums: Any, one: Any, other: Any) -> Any:
    """What AVX512-BF16 does in one instruction, for processors without it; the order of the two channels may differ."""
    words = ir.VectorType(ir.IntType(32), LANES)
    for first in (True, False):
        channels = (
            builder.shl(each, constant(words, 16)) if first else builder.and_(each, constant(words, -1 << 16))
            for each in (one, other)
        )
        sums = fused(builder, *(builder.bitcast(each, floats(LANES)) for each in channels), sums)
    return sums


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of channels in bfloat16, as on a processor that multiplies them."""
    monkeypatch.setattr(PairDot, "add", add_pairs)
    for module in (attention_instructions, key_panels):
        monkeypatch.setattr(
            module, "has_pair_dots", lambda _, array, width: array.dtype.bitwidth == 16 and width % 32 == 0
        )


def unequal_scores(width: int, *, is_narrow: bool) -> int:
    """The number of scores that differ with a panel, for some numbers of keys and first keys; all are finite."""
    rng, unequal = np.random.default_rng(width), 0
    directly, with_panel = scorers(width)
    for count, first in ((1, 0), (17, 16), (37, 5), (COLUMNS, 0)):
        queries, keys = (rng.standard_normal((rows, width)).astype(np.float32) for rows in (QUERIES, count))
        if is_narrow:
            queries, keys = ((each.view(np.uint32) >> 16).astype(np.uint16) for each in (queries, keys))
        scores = with_panel(queries, keys, first)
        assert np.isfinite(scores).all()
        unequal += np.count_nonzero(scores != directly(queries, keys)[:, first:])
    return unequal


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("width", [16, 64, 256])
def test_scores_have_the_same_bits_with_a_panel(width: int, is_narrow: bool) -> None:
    assert unequal_scores(width, is_narrow=is_narrow) == 0


@pytest.mark.usefixtures("pairs")
def test_scores_of_pairs_have_the_same_bits_with_a_panel() -> None:
    assert unequal_scores(64, is_narrow=True) == 0


def test_only_keys_that_fill_vectors_and_fit_in_a_cache_are_transposed() -> None:
    assert [width for width in (1, 8, 16, 24, 64, 80, 128, 256, 576) if can_transpose(width)] == [16, 64, 80, 128, 256]
