"""Polynomial hashes of a prompt's blocks, by which equal prefixes find each other."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

HASH_PRIME = 2305843009213693951
"""2**61 - 1."""
HASH_BASE = 31


def compute_block_hashes_batched(prompt_tokens: Tensor, block_size: int) -> list[int]:
    """Hash every complete block of a prompt, each together with all blocks before it.

    Token sums are taken in wrapping 64-bit arithmetic, chains in unbounded integers. Different blocks can have the
    same hash (it is easy to construct such blocks), so a user of these hashes has to compare tokens too.

    Args:
        prompt_tokens: int64 [prompt length].
        block_size: Tokens per block.

    Returns:
        One hash from 1 to HASH_PRIME for each of the ``prompt length // block_size`` complete blocks.
    """
    import torch  # not above: clients and frontends handle requests without it

    num_blocks = prompt_tokens.numel() // block_size
    if num_blocks == 0:
        return []
    blocks = prompt_tokens[: num_blocks * block_size].to(torch.int64).view(num_blocks, block_size)
    weights = _block_weights(block_size).to(blocks.device)
    token_hashes = ((blocks * weights).sum(dim=1) % HASH_PRIME).tolist()
    chain: list[int] = []
    parent = 0
    for token_hash in token_hashes:
        parent = (parent * HASH_BASE + token_hash) % HASH_PRIME + 1
        chain.append(parent)
    return chain


@lru_cache(maxsize=16)
def _block_weights(block_size: int) -> Tensor:
    """int64 [block_size]: powers of the base, wrapped to signed 64 bits, then reduced modulo the prime."""
    import torch

    weights = []
    power = 1
    for _ in range(block_size):
        signed = power - 2**64 if power >= 2**63 else power
        weights.append(signed % HASH_PRIME)
        power = power * HASH_BASE % 2**64
    return torch.tensor(weights, dtype=torch.int64)
