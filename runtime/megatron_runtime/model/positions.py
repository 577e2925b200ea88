"""The rotations of a batch's tokens, by layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.kernels.row_kernels import has_gpu_row_kernels
from megatron_runtime.model.rotary import Rotation, inverse_frequencies, local_inverse_frequencies, rotation


class LayerPositions(NamedTuple):
    """The positions of a batch's T tokens as one layer uses them."""

    rotation: Rotation | None
    """None: queries and keys are not rotated."""
    query_scale: Tensor | None
    """[T, 1, 1], the factor of each token's queries; None: one."""


class Positions(nn.Module):
    """Rotations per layer. In most models all layers have the same; some models have another one, or none, in some
    layers.
    """

    frequencies: Tensor
    """float32 [rotated channels / 2], independent of the weights' dtype because positions need the precision."""
    local_frequencies: Tensor | None

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self._dtype = dtype
        self._magnitude = config.rope_scaling.magnitude
        self._temperature = config.query_temperature
        self._kinds = [_kind(config, layer) for layer in range(config.num_layers)]
        # Computed on the CPU: equal on every device, and on the meta device torch would import a compiler.
        local = local_inverse_frequencies(config)
        self.register_buffer("frequencies", inverse_frequencies(config).to(device), persistent=False)
        self.register_buffer("local_frequencies", None if local is None else local.to(device), persistent=False)

    def forward(self, positions: Tensor) -> list[LayerPositions]:
        """The rotation and the query scale of tokens at ``positions`` [T] for each layer, computed once per kind."""
        made: dict[str, Rotation | None] = {"none": None}
        if "all" in self._kinds:
            made["all"] = self._rotation(positions, self.frequencies, self._magnitude)
        if self.local_frequencies is not None:
            made["local"] = self._rotation(positions, self.local_frequencies, 1.0)
        scale, only_unrotated = self._query_scale(positions)
        return [
            LayerPositions(made[kind], None if only_unrotated and kind != "none" else scale) for kind in self._kinds
        ]

    def _query_scale(self, positions: Tensor) -> tuple[Tensor | None, bool]:
        """The factor of the queries, and whether it is that of the layers without rotation alone."""
        if (temperature := self._temperature) is None:
            return None, False
        steps = torch.floor((positions.float() + temperature.offset) / temperature.interval)
        scale = 1.0 + temperature.strength * torch.log1p(steps)
        return scale[:, None, None].to(self._dtype), temperature.only_unrotated

    def _rotation(self, positions: Tensor, frequencies: Tensor, magnitude: float) -> Rotation:
        if has_gpu_row_kernels(frequencies):
            from megatron_runtime.gpu import rows  # Triton is not needed on other devices.

            return rows.rotation(positions, frequencies, self._dtype, magnitude)
        return rotation(positions, frequencies, self._dtype, magnitude)


def _kind(config: ModelConfig, layer: int) -> str:
    if layer in config.unrotated_layers:
        return "none"
    return "local" if config.local_rope_theta is not None and config.window(layer) is not None else "all"
