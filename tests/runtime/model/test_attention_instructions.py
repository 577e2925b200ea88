"""The innermost loops of attention: each result is the same, whatever is computed together with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from numba import njit

from megatron_runtime.model.kernels.attention_chunks import NEVER
from megatron_runtime.model.kernels.attention_instructions import TOGETHER, mix_values, score_keys
from megatron_runtime.model.kernels.softmax_instructions import soften_scores

KEYS, COLUMNS = 7, 16
SCALE = 0.25
WIDTHS = (1, 6, 8, 48, 64, 576)
DTYPES = (np.float32, np.uint16)


def numbers(rng: np.random.Generator, dtype: Any, *shape: int) -> Any:
    """Random ones; uint16 are the bits of bfloat16."""
    made = rng.standard_normal(shape).astype(np.float32)
    return made if dtype is np.float32 else (made.view(np.uint32) >> 16).astype(np.uint16)


def exact(array: Any) -> Any:
    """As float64."""
    wide = array if array.dtype == np.float32 else (array.astype(np.uint32) << 16).view(np.float32)
    return wide.astype(np.float64)


def scorer(width: int) -> Callable[..., Any]:
    """The scores of queries and keys of this width."""

    @njit
    def score(queries: Any, keys: Any) -> Any:
        scores = np.zeros((len(queries), COLUMNS), np.float32)
        given, key, to = queries.ctypes.data, keys.ctypes.data, scores.ctypes.data
        score_keys(keys, len(queries), width, given, key, len(keys), to, COLUMNS, np.float32(SCALE), key)
        return scores

    return score  # type: ignore[no-any-return]


def mixer(width: int) -> Callable[..., Any]:
    """Adds weighted values of this width to sums."""

    @njit
    def mix(sums: Any, values: Any, shares: Any) -> None:
        value, to, given = values.ctypes.data, sums.ctypes.data, shares.ctypes.data
        mix_values(values, len(sums), width, values.itemsize * width, to, value, len(values), given, COLUMNS, value)

    return mix  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_scores_are_products_and_depend_on_no_other_query_or_key(width: int, dtype: Any) -> None:
    rng, score = np.random.default_rng(1), scorer(width)
    queries, keys = numbers(rng, dtype, TOGETHER, width), numbers(rng, dtype, KEYS, width)
    expected = SCALE * exact(queries) @ exact(keys).T
    alone = np.array([[score(one[None], key[None])[0, 0] for key in keys] for one in queries])
    np.testing.assert_allclose(alone, expected, rtol=1e-5, atol=1e-5)
    for count in range(1, TOGETHER + 1):
        scores = score(queries[:count], keys)
        np.testing.assert_array_equal(scores[:, :KEYS], alone[:count])
        assert not scores[:, KEYS:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_sums_of_values_depend_on_no_other_query(width: int, dtype: Any) -> None:
    rng, mix = np.random.default_rng(2), mixer(width)
    values, sums = numbers(rng, dtype, KEYS, width), numbers(rng, np.float32, TOGETHER, width)
    shares = numbers(rng, np.float32, TOGETHER, COLUMNS)
    expected = exact(sums) + exact(shares)[:, :KEYS] @ exact(values)
    alone = sums.copy()
    for row in range(TOGETHER):
        mix(alone[row : row + 1], values, shares[row : row + 1])
    np.testing.assert_allclose(alone, expected, rtol=1e-5, atol=1e-5)
    for count in range(1, TOGETHER + 1):
        together = sums[:count].copy()
        mix(together, values, shares)
        np.testing.assert_array_equal(together, alone[:count])


@cache
def softener(width: int) -> Callable[..., None]:
    """Softens scores, and scales sums of this width."""

    @njit
    def soften(scores: Any, tops: Any, totals: Any, sums: Any) -> None:
        given, top, total, to = scores.ctypes.data, tops.ctypes.data, totals.ctypes.data, sums.ctypes.data
        soften_scores(len(scores), COLUMNS, width, given, top, total, to)

    return soften


@pytest.mark.parametrize("width", WIDTHS)
def test_a_softmax_over_chunks_is_that_of_all_scores_and_depends_on_no_other_query(width: int) -> None:
    rng, soften = np.random.default_rng(3), softener(width)
    scores = 10 * numbers(rng, np.float32, TOGETHER + 1, COLUMNS)
    scores[:, 3], scores[-1] = NEVER, NEVER
    tops = scores.max(1) + np.array([-np.inf, -30, 0, 30, 0], np.float32)
    tops[-1] = 5
    state = tops, numbers(rng, np.float32, TOGETHER + 1), numbers(rng, np.float32, TOGETHER + 1, width)
    new_tops = np.maximum(tops, scores.max(1))
    fades, shares = (np.exp(exact(each)) for each in (tops - new_tops, scores - new_tops[:, None]))
    alone = [each.copy() for each in (scores, *state)]
    for row in range(len(scores)):
        soften(*(each[row : row + 1] for each in alone))
    expected = shares, new_tops, state[1] * fades + shares.sum(1), state[2] * fades[:, None]
    for given, wanted in zip(alone, expected, strict=True):
        np.testing.assert_allclose(given, wanted, rtol=1e-6, atol=1e-35)
    for begin, count in ((0, 1), (0, 2), (0, 3), (0, 4), (1, 4)):
        together = [each[begin : begin + count].copy() for each in (scores, *state)]
        soften(*together)
        for given, wanted in zip(together, alone, strict=True):
            np.testing.assert_array_equal(given, wanted[begin : begin + count])


@pytest.mark.parametrize("place", range(COLUMNS))
def test_a_score_that_is_not_a_number_stays_so_and_affects_its_query_alone(place: int) -> None:
    scores, sums = np.zeros((2, COLUMNS), np.float32), np.ones((2, 8), np.float32)
    tops, totals = np.zeros(2, np.float32), np.ones(2, np.float32)
    scores[1, place] = np.nan
    softener(8)(scores, tops, totals, sums)
    assert (np.isnan(totals).tolist(), np.isnan(scores[0]).any(), np.isnan(scores[1, place])) == (
        [False, True],
        False,
        True,
    )
    assert not np.isnan(sums[0]).any()
