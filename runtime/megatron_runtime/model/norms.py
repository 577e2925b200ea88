"""Normalization over the last dimension, computed in float32 whatever the weights' type."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.row_kernels import has_row_kernels, rms_norm


class RMSNorm(nn.Module):
    """Root mean square normalization (Zhang and Sennrich)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize over the last dimension."""
        if has_row_kernels(inputs):
            return rms_norm(inputs, self.weight, self.eps)
        return self.weight * self._scaled(inputs).to(inputs.dtype)

    def _scaled(self, inputs: Tensor) -> Tensor:
        return functional.rms_norm(inputs.float(), (inputs.shape[-1],), eps=self.eps)


class RMSNormPlusOne(RMSNorm):
    """The same where the file holds the weights less one (Gemma).

    The one is added here and not at load: bfloat16 keeps fewer digits of ``1 + w`` than of ``w``.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize over the last dimension."""
        return (self._scaled(inputs) * (1.0 + self.weight.float())).to(inputs.dtype)


class LayerNorm(nn.Module):
    """Normalization by mean and variance, with a bias (Ba et al.)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize over the last dimension."""
        return functional.layer_norm(inputs, self.weight.shape, self.weight, self.bias, self.eps)


Norm = RMSNorm | LayerNorm
_KINDS: dict[str, type[Norm]] = {"rms": RMSNorm, "rms_plus_one": RMSNormPlusOne, "layer": LayerNorm}


def make_norm(config: ModelConfig, size: int, dtype: torch.dtype) -> Norm:
    """The kind of norm that ``config`` names, over ``size`` channels; its weights are uninitialized."""
    return _KINDS[config.norm](size, config.rms_norm_eps, dtype)
