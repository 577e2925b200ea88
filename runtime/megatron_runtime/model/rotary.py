"""Rotary position embedding (Su et al., RoFormer) with the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_runtime.model.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """float32 [head_dim / 2]: how fast each pair of channels turns, in radians per token."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _stretch_slow_frequencies(frequencies, scaling)
    return frequencies


def _stretch_slow_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's scaling: slow channels are divided by the factor, fast ones stay, those between are blended."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    share_kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (share_kept + (1.0 - share_kept) / scaling.factor)


def rotation(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines for tokens at ``positions`` [T]; each [T, 1, head_dim] in ``dtype``, ready to broadcast."""
    angles = positions[:, None].float() * frequencies[None, :]
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn ``heads`` [T, heads, head_dim]; channel i is paired with channel i + head_dim / 2."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines
