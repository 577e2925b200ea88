"""Exponential noise for Gumbel-max sampling: a function of seed, position and token.

The noise does not depend on the batch or on the machine. So a request that continues on another engine, or after an
eviction, samples the same tokens. If two batches round logits differently, the sampled tokens differ only if two scores
are equal up to that rounding.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 32
"""Tokens per block. The minimum noise of a block can be computed without the noise of its tokens."""
_LARGEST_BELOW_ONE = 1 - 2.0**-24
STREAM = 0x5BD1E995
"""Makes the place of a block's minimum independent of its value."""


def noise_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A key of the noise for each pair of seed and position: uint64 [S].

    The finalizer of SplitMix64 (Steele, Lea and Flood 2014) is applied to the seed, then to the position as a counter,
    so that the streams of neighbouring seeds are unrelated.
    """
    return _mix64(_mix64(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))


def exponential_noise(keys: NDArray[np.uint64], tokens: Tensor) -> Tensor:
    """Independent exponential variates of mean 1 for each key and token: float32 [len(keys), n], above 0.

    The variates are generated per block of B tokens. The minimum of a block is exponential with mean 1 / B, and each
    token of the block is equally likely to have it. The other tokens exceed it by independent exponential variates of
    mean 1, because the exponential distribution is memoryless.

    Args:
        keys: From noise_keys.
        tokens: Integers [n], or [len(keys), n] with the tokens of each key.
    """
    minimum, place = _block_minima(keys, tokens // BLOCK)
    excess = _exponential(_hash(keys, tokens))
    return minimum.add_(excess.masked_fill_(tokens % BLOCK == place, 0))


def block_minima(keys: NDArray[np.uint64], num_blocks: int, device: torch.device) -> Tensor:
    """The minimum noise of each of the first blocks: float32 [len(keys), num_blocks]."""
    return _block_minima(keys, torch.arange(num_blocks, device=device))[0]


def _block_minima(keys: NDArray[np.uint64], blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The minimum noise of some blocks, and its index in the block."""
    mixed = _hash(keys, blocks.bitwise_not())  # Negative, in contrast to token ids.
    place = _mix32(mixed ^ STREAM).bitwise_and_(BLOCK - 1)
    return _exponential(mixed).div_(BLOCK), place


def _hash(keys: NDArray[np.uint64], values: Tensor) -> Tensor:
    """Uniform pseudorandom bits: int32 [len(keys), n]."""
    low, high = (half.to(values.device)[:, None] for half in key_halves(keys))
    return _mix32(_mix32(values.to(torch.int32) ^ low).bitwise_xor_(high))


def _exponential(mixed: Tensor) -> Tensor:
    uniform = mixed.bitwise_and(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST_BELOW_ONE)
    # Sampled tokens have small noise, for which log1p is exact.
    return uniform.neg_().log1p_().neg_()


def key_halves(keys: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
    """The lower and the upper 32 bits of keys, int32, on the host."""
    low = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
    high = (keys >> np.uint64(32)).astype(np.uint32).view(np.int32)
    return torch.from_numpy(low), torch.from_numpy(high)


def _mix64(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _mix32(value: Tensor) -> Tensor:
    """The integer hash ``lowbias32`` (Wellons 2018), in place. torch's right shift copies the sign bit, which is
    masked."""
    value.bitwise_xor_((value >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    value.bitwise_xor_((value >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - (1 << 32))
    return value.bitwise_xor_((value >> 16).bitwise_and_(0xFFFF))
