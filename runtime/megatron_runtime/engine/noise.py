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

_LARGEST_BELOW_ONE = 1 - 2.0**-24


def noise_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """What decides the noise of a row: one key for each pair of seed and position.

    The finalizer of SplitMix64 (Steele, Lea and Flood 2014), first over the seed, then over the position as a
    counter, so that neighbouring seeds give unrelated streams.
    """
    return _mix64(_mix64(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))


def delays(keys: NDArray[np.uint64], vocabulary: int, device: torch.device) -> Tensor:
    """Exponentially distributed with mean 1, for each key and each token: float32 [len(keys), vocabulary], above 0."""
    return delays_of(keys, torch.arange(vocabulary, device=device))


def delays_of(keys: NDArray[np.uint64], tokens: Tensor) -> Tensor:
    """The same for some tokens only: integers [n], or [len(keys), n] of each key's own."""
    low, high = (half.to(tokens.device)[:, None] for half in _halves(keys))
    tokens = tokens.to(torch.int32)
    mixed = _mix32(_mix32(tokens ^ low).bitwise_xor_(high))
    uniform = mixed.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST_BELOW_ONE)
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
