"""Noise that depends on seed, position and token alone, and on nothing that shares the batch or the machine.

Each token of the vocabulary gets an exponentially distributed delay; the token with the smallest delay in proportion
to its probability wins (the Gumbel-max trick as a race; Maddison, Tarlow and Minka 2014). Rounding that differs between
two batches moves a winner only when two tokens finish in a tie, so that a request goes on elsewhere as it would here.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 32
"""Tokens whose smallest delay is known before their own."""
_LARGEST_BELOW_ONE = 1 - 2.0**-24
_OTHER_STREAM = 0x5BD1E995


def noise_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """What decides the noise of a row: one key for each pair of seed and position.

    The finalizer of SplitMix64 (Steele, Lea and Flood 2014), first over the seed, then over the position as a
    counter, so that neighbouring seeds give unrelated streams.
    """
    return _mix64(_mix64(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))


def delays_of(keys: NDArray[np.uint64], tokens: Tensor) -> Tensor:
    """Exponentially distributed with mean 1 for each key and token, independently: float32 [len(keys), n], above 0.

    Made block by block. The smallest of a block's delays is exponential with a mean of 1 over their number, any of the
    tokens has it, and the others are later by exponential delays of their own, since exponential delays have no memory.

    Args:
        keys: As from noise_keys.
        tokens: Integers [n], or [len(keys), n] of each key's own.
    """
    first, place = _firsts(keys, tokens // BLOCK)
    later = _exponential(_hash(keys, tokens))
    return first.add_(later.masked_fill_(tokens % BLOCK == place, 0))


def first_delays(keys: NDArray[np.uint64], num_blocks: int, device: torch.device) -> Tensor:
    """The smallest delay of each of the first blocks: float32 [len(keys), num_blocks]."""
    return _firsts(keys, torch.arange(num_blocks, device=device))[0]


def _firsts(keys: NDArray[np.uint64], blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest delay of some blocks, and the place in the block that has it."""
    mixed = _hash(keys, blocks.bitwise_not())  # below 0, where no token is
    place = _mix32(mixed ^ _OTHER_STREAM).bitwise_and_(BLOCK - 1)
    return _exponential(mixed).div_(BLOCK), place


def _hash(keys: NDArray[np.uint64], values: Tensor) -> Tensor:
    """int32 [len(keys), n], all bits as good as random."""
    low, high = (half.to(values.device)[:, None] for half in _halves(keys))
    return _mix32(_mix32(values.to(torch.int32) ^ low).bitwise_xor_(high))


def _exponential(mixed: Tensor) -> Tensor:
    uniform = mixed.bitwise_and(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST_BELOW_ONE)
    # The winners' delays are small: log1p of a small number keeps all of its digits.
    return uniform.neg_().log1p_().neg_()


def _halves(keys: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
    low = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
    high = (keys >> np.uint64(32)).astype(np.uint32).view(np.int32)
    return torch.from_numpy(low), torch.from_numpy(high)


def _mix64(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _mix32(value: Tensor) -> Tensor:
    """The integer hash ``lowbias32`` (Wellons 2018), in place; torch's shifts keep the sign, so it is masked away."""
    value.bitwise_xor_((value >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    value.bitwise_xor_((value >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - (1 << 32))
    return value.bitwise_xor_((value >> 16).bitwise_and_(0xFFFF))
