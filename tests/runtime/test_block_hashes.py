"""Hashes of prompt blocks, compared with the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.inference_request import (
    HASH_BASE,
    HASH_PRIME,
    compute_block_hashes,
    compute_block_hashes_batched,
)


@pytest.mark.parametrize(
    ("tokens", "block_size", "hashes"),
    [
        (range(10), 4, [91327, 3045600]),
        (range(1, 9), 4, [122111, 4030688]),
        (range(40), 16, [516798452194901777, 1308614367207617097]),
        (range(3), 4, []),
    ],
)
def test_block_hashes_are_the_reference_values(tokens: range, block_size: int, hashes: list[int]) -> None:
    assert compute_block_hashes_batched(torch.tensor(list(tokens)), block_size) == hashes


def test_a_salt_changes_all_hashes_of_a_prompt() -> None:
    tokens = list(range(40))
    hashes = [compute_block_hashes(tokens, 8, salt) for salt in (None, "a", "b", "a")]
    assert hashes[1] == hashes[3]
    assert not set(hashes[0]) & set(hashes[1])
    assert not set(hashes[1]) & set(hashes[2])
    assert compute_block_hashes_batched(torch.tensor(tokens), 8, "a") == hashes[1]


def test_adapters_and_salts_together_change_all_hashes_of_a_prompt() -> None:
    tokens = list(range(40))
    pairs = [(salt, adapter) for salt in (None, "", "a", "b") for adapter in (None, "", "a", "b")]
    hashes = [compute_block_hashes(tokens, 8, salt, adapter) for salt, adapter in pairs]
    assert len({each for of_pair in hashes for each in of_pair}) == len(pairs) * 5
    assert compute_block_hashes_batched(torch.tensor(tokens), 8, "a", "b") == compute_block_hashes(tokens, 8, "a", "b")


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=80), st.integers(1, 40))
def test_block_hashes_follow_their_closed_form(tokens: list[int], block_size: int) -> None:
    def signed(value: int) -> int:
        return (value + 2**63) % 2**64 - 2**63

    weights = [signed(HASH_BASE**i % 2**64) % HASH_PRIME for i in range(block_size)]
    parent, expected = 0, []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        total = sum(token * weight for token, weight in zip(tokens[start:], weights, strict=False))
        parent = (parent * HASH_BASE + signed(total % 2**64) % HASH_PRIME) % HASH_PRIME + 1
        expected.append(parent)
    assert compute_block_hashes_batched(torch.tensor(tokens), block_size) == expected


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60), st.integers(1, 70))
def test_hashes_wrap_where_64_bit_integers_do(tokens: list[int], block_size: int) -> None:
    blocks = torch.tensor(tokens, dtype=torch.int64)[: len(tokens) // block_size * block_size].view(-1, block_size)
    weights = [31**place % 2**64 for place in range(block_size)]
    signed = torch.tensor([(each - 2**64 if each >= 2**63 else each) % HASH_PRIME for each in weights])
    expected: list[int] = []
    for total in ((blocks * signed).sum(dim=1) % HASH_PRIME).tolist():
        expected.append(((expected[-1] if expected else 0) * 31 + total) % HASH_PRIME + 1)
    assert compute_block_hashes(tokens, block_size) == expected
