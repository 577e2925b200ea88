"""Rotary position embedding (Su et al., RoFormer) with the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.rope_scaling import RopeScaling

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of a batch's tokens, each [T, 1, rotated channels]."""


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """float32 [rotated channels / 2]: the frequency of each pair of channels, in radians per token."""
    frequencies = _plain_frequencies(config, config.rope_theta)
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _scale_low_frequencies(frequencies, scaling)
    if scaling.kind == "yarn":
        return _blend_by_channel(frequencies, config.rope_theta, scaling)
    if scaling.kind == "longrope":
        # One choice per served length. With one per request, cached keys of a growing request would have other
        # frequencies than its new ones.
        beyond = config.max_position_embeddings > scaling.original_max_position_embeddings
        return frequencies / torch.tensor(scaling.long_factors if beyond else scaling.short_factors)
    return frequencies


def local_inverse_frequencies(config: ModelConfig) -> Tensor | None:
    """The same for the layers with a window; None where they equal the others."""
    return None if config.local_rope_theta is None else _plain_frequencies(config, config.local_rope_theta)


def _plain_frequencies(config: ModelConfig, theta: float) -> Tensor:
    channels = config.rotary_dim or config.head_dim
    exponents = torch.arange(0, channels, 2, dtype=torch.int64).float() / channels
    return 1.0 / (theta**exponents)


def _scale_low_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's scaling: low frequencies are divided by the factor, high ones are kept, those between are
    interpolated.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    share_kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (share_kept + (1.0 - share_kept) / scaling.factor)


def _blend_by_channel(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """YaRN (Peng et al.): the same, but interpolated linearly in the channel, not in the frequency."""
    pairs = len(frequencies)

    def channel(turns: float) -> float:
        """The (fractional) pair of channels with this many rotations over the original length."""
        length = scaling.original_max_position_embeddings
        return pairs * math.log(length / (2 * math.pi * turns)) / math.log(theta)

    first, last = channel(scaling.high_frequency_factor), channel(scaling.low_frequency_factor)
    if scaling.whole_channels:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first or 0.001
    share_divided = ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    return frequencies * (1.0 - share_divided + share_divided / scaling.factor)


def rotation(positions: Tensor, frequencies: Tensor, dtype: torch.dtype, magnitude: float = 1.0) -> Rotation:
    """Cosines and sines, times ``magnitude``, for tokens at ``positions`` [T]; in ``dtype``, ready to broadcast."""
    angles = positions[:, None].float() * frequencies[None, :]
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate ``heads`` [T, heads, head_dim]: of n rotated channels, i is paired with i + n / 2; the others are kept."""
    if (channels := cosines.shape[-1]) < heads.shape[-1]:
        return torch.cat((rotate(heads[..., :channels], cosines, sines), heads[..., channels:]), dim=-1)
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines
