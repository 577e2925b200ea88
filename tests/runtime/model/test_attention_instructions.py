"""The innermost loops of attention: each result is the same, whatever is computed together with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import njit

from megatron_runtime.model.kernels.attention_instructions import TOGETHER, largest, mix_values, score_keys

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


def test_the_largest_of_some_numbers_at_any_place() -> None:
    @njit
    def largest_of(numbers: Any) -> Any:
        return largest(numbers.ctypes.data, 64)

    for place in range(64):
        given = np.arange(-64, 0, dtype=np.float32)
        given[place] = 5.0
        assert largest_of(given) == 5.0
