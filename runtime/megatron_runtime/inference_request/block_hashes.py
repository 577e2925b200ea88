"""Polynomial hashes of a prompt's blocks, which identify equal prefixes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from operator import mul
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

HASH_PRIME = 2305843009213693951
"""2**61 - 1."""
HASH_BASE = 31


def compute_block_hashes_batched(
    prompt_tokens: Tensor, block_size: int, salt: str | None = None, adapter: str | None = None
) -> list[int]:
    """Hash every complete block of a prompt, each together with all blocks before it.

    Args:
        prompt_tokens: int64 [prompt length].
        block_size: Tokens per block.
        salt: As for compute_block_hashes.
        adapter: The same.

    Returns:
        As for compute_block_hashes.
    """
    return compute_block_hashes(prompt_tokens.tolist(), block_size, salt, adapter)


def compute_block_hashes(
    tokens: Sequence[int], block_size: int, salt: str | None = None, adapter: str | None = None
) -> list[int]:
    """Hash every complete block of a list of tokens, for processes without torch.

    Token sums use wrapping 64-bit arithmetic, chains unbounded integers. Different blocks can have the same hash, and
    such blocks are easy to construct, so that users of these hashes have to compare tokens too.

    Args:
        tokens: 64-bit integers.
        block_size: Tokens per block.
        salt: Prompts with different salts have different hashes. Users who do not share a salt can't find out by the
            prefix cache what the others asked.
        adapter: Identifies the adapter that computes the keys and values; prompts with different ones have different
            hashes.

    Returns:
        One hash from 1 to HASH_PRIME for each of the ``len(tokens) // block_size`` complete blocks.
    """
    weights = _block_weights(block_size)
    chain: list[int] = []
    parent = 0 if salt is None and adapter is None else _salt_hash(salt, adapter)
    for start in range(0, len(tokens) - block_size + 1, block_size):
        token_hash = _signed(sum(map(mul, tokens[start : start + block_size], weights))) % HASH_PRIME
        parent = (parent * HASH_BASE + token_hash) % HASH_PRIME + 1
        chain.append(parent)
    return chain


def _salt_hash(salt: str | None, adapter: str | None) -> int:
    # UTF-8 has no byte 255, so that no salt has the hash of another one with an adapter.
    parts = ([] if adapter is None else [b"\xff" + adapter.encode()]) + ([] if salt is None else [salt.encode()])
    return int.from_bytes(hashlib.sha256(b"\xff".join(parts)).digest()[:8]) % HASH_PRIME + 1


@lru_cache(maxsize=16)
def _block_weights(block_size: int) -> list[int]:
    """Powers of the base, wrapped to signed 64 bits, then reduced modulo the prime."""
    return [_signed(HASH_BASE**place) % HASH_PRIME for place in range(block_size)]


def _signed(value: int) -> int:
    """The integer wrapped to 64 bits, two's complement."""
    return (value + 2**63) % 2**64 - 2**63
