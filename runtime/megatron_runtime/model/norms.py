"""Normalization over the last dimension, computed in float32 for every dtype of the weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.kernels import row_kernels
from megatron_runtime.model.kernels.row_kernels import (
    has_cpu_row_kernels,
    has_gpu_row_kernels,
    has_row_kernels,
    rms_norm,
)
from megatron_runtime.parallel.ranks import Ranks


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
    """RMSNorm with stored weights that are one less (Gemma).

    The one is added here and not at load, because bfloat16 keeps fewer digits of ``1 + w`` than of ``w``.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize over the last dimension."""
        if has_gpu_row_kernels(inputs):
            return _on_gpu(self, inputs)
        return (self._scaled(inputs) * (1.0 + self.weight.float())).to(inputs.dtype)


class RMSNormInFloat32(RMSNorm):
    """RMSNorm whose result is rounded once, after the multiplication with the weights (Nemotron-H)."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize over the last dimension."""
        return (self._scaled(inputs) * self.weight.float()).to(inputs.dtype)


class SharedRMSNorm(RMSNorm):
    """RMSNorm over the channels of all ranks of a layer, of which ``size`` are on each rank.

    Channels that several ranks have, those of a replicated key head, all count equally often.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, ranks: Ranks) -> None:
        super().__init__(size, eps, dtype)
        self._ranks = ranks

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize over the last dimension and the ranks."""
        wide = inputs.float()
        mean_square = self._ranks.sum(wide.square().mean(-1, keepdim=True)) / self._ranks.position.sizes.tensor
        return self.weight * (wide * torch.rsqrt(mean_square + self.eps)).to(inputs.dtype)


class LayerNorm(nn.Module):
    """Normalization by mean and variance, with a bias (Ba et al.)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize over the last dimension."""
        if has_gpu_row_kernels(inputs):
            return _on_gpu(self, inputs)
        return functional.layer_norm(inputs, self.weight.shape, self.weight, self.bias, self.eps)


class LayerNormWithoutBias(nn.Module):
    """The same without a bias (Cohere).

    Weights of several dimensions are those of separate heads; each head is normalized over its own channels.
    """

    def __init__(self, size: int | tuple[int, ...], eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize over the last dimension."""
        normalized = functional.layer_norm(inputs.float(), inputs.shape[-1:], eps=self.eps)
        return (normalized * self.weight.float()).to(inputs.dtype)


Norm = RMSNorm | LayerNorm | LayerNormWithoutBias
NO_NORM = nn.Identity()
"""Where a model has no norm."""
_KINDS: dict[str, type[Norm]] = {
    "rms": RMSNorm,
    "rms_plus_one": RMSNormPlusOne,
    "rms_in_float32": RMSNormInFloat32,
    "layer": LayerNorm,
    "layer_without_bias": LayerNormWithoutBias,
}
_NAMES: dict[type[nn.Module], str] = {RMSNorm: "rms", RMSNormPlusOne: "rms_plus_one", LayerNorm: "layer"}
"""The kinds with kernels for GPUs."""


def add_and_normalize(
    hidden: Tensor, update: Tensor, multiplier: float, update_norm: Norm | nn.Identity, norm: Norm | nn.Identity
) -> tuple[Tensor, Tensor]:
    """``hidden + multiplier * update_norm(update)``, and its norm: both [T, hidden]; on a GPU by one kernel, and on a
    CPU for sums that are normalized by `RMSNorm` alone.

    If both are norms, they have the same type and epsilon.
    """
    if type(norm) is RMSNorm and isinstance(update_norm, nn.Identity) and has_cpu_row_kernels(hidden):
        given = hidden.contiguous(), update.contiguous()
        return row_kernels.add_and_normalize(*given, multiplier, norm.weight, norm.eps)
    if type(norm) not in _NAMES or not has_gpu_row_kernels(hidden):
        hidden = _add_normalized(hidden, update, multiplier, update_norm)
        return hidden, norm(hidden)
    from megatron_runtime.gpu import rows

    of_update = None if isinstance(update_norm, nn.Identity) else _parameters(update_norm)[:2]
    return rows.add_and_normalize(hidden, update, multiplier, *_parameters(norm), of_update)


def _add_normalized(hidden: Tensor, update: Tensor, multiplier: float, norm: Norm | nn.Identity) -> Tensor:
    """``hidden + multiplier * norm(update)``: [T, hidden]; on a GPU by one kernel."""
    if type(norm) in _NAMES and has_gpu_row_kernels(hidden):
        from megatron_runtime.gpu import rows

        return rows.add_normalized(hidden, update, multiplier, *_parameters(norm))
    return hidden.add(norm(update), alpha=multiplier)


def normalize_heads(heads: Tensor, counts: tuple[int, int, int], query_norm: Norm, key_norm: Norm) -> Tensor:
    """Normalize each query and key over its own channels: [T, heads, width] to the same.

    ``counts`` are the numbers of queries, keys and values; ``heads`` may be changed.
    """
    kind = _NAMES.get(type(query_norm), "")
    if kind.startswith("rms") and len(query_norm.weight) == heads.shape[-1] and has_gpu_row_kernels(heads):
        from megatron_runtime.gpu import rows

        assert isinstance(query_norm, RMSNorm)
        rows.normalize_heads_(heads, counts[:2], (query_norm.weight, key_norm.weight), query_norm.eps, kind)
        return heads
    if kind == "rms" and len(query_norm.weight) == heads.shape[-1] and has_cpu_row_kernels(heads):
        assert isinstance(query_norm, RMSNorm)
        given, weights = heads.contiguous(), (query_norm.weight, key_norm.weight)
        row_kernels.normalize_heads(given, counts[:2], weights, query_norm.eps)
        return given
    queries, keys, values = torch.split(heads, list(counts), dim=1)
    return torch.cat((query_norm(queries), key_norm(keys), values), 1)


def normalize_projections(heads: Tensor, counts: tuple[int, int, int], query_norm: Norm, key_norm: Norm) -> Tensor:
    """As `normalize_heads`, over the channels of all queries and of all keys of a token."""
    kind = _NAMES.get(type(query_norm), "")
    if kind.startswith("rms") and has_gpu_row_kernels(heads):
        from megatron_runtime.gpu import rows

        assert isinstance(query_norm, RMSNorm)
        weights = query_norm.weight, key_norm.weight
        sizes = len(weights[0]), len(weights[1])
        rows.normalize_projections_(heads.flatten(1), sizes, weights, query_norm.eps, kind)
        return heads
    queries, keys, values = torch.split(heads, list(counts), dim=1)
    normed = (norm(part.flatten(1)) for norm, part in ((query_norm, queries), (key_norm, keys)))
    return torch.cat([*(each.view(len(heads), -1, heads.shape[2]) for each in normed), values], 1)


def _on_gpu(norm: Norm, inputs: Tensor) -> Tensor:
    from megatron_runtime.gpu import rows  # Triton is not needed on other devices.

    return rows.normalize(inputs, *_parameters(norm))


def _parameters(norm: nn.Module) -> tuple[Tensor, Tensor | None, float, str]:
    """Weight, bias, epsilon and the name of the kind."""
    assert isinstance(norm, RMSNorm | LayerNorm)
    return norm.weight, norm.bias if isinstance(norm, LayerNorm) else None, norm.eps, _NAMES[type(norm)]


def make_norm(config: ModelConfig, size: int, dtype: torch.dtype, among: Ranks | None = None) -> Norm:
    """The kind of norm in ``config``, over ``size`` channels. Its weights are uninitialized.

    With ``among``, over the channels of all ranks that share a layer. Raises ConfigurationError for unsupported kinds.
    """
    if among is not None and (tensor := among.position.sizes.tensor) > 1:
        if config.norm != "rms":
            raise ConfigurationError(
                f"tensor parallel size is {tensor}, but {config.architecture} normalizes all its heads together in a "
                "way that ranks can't share; use 1",
                field="tensor",
            )
        return SharedRMSNorm(size, config.rms_norm_eps, dtype, among)
    return _KINDS[config.norm](size, config.rms_norm_eps, dtype)
