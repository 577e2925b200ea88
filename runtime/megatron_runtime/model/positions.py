"""The rotations of a batch's tokens, by layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.rotary import Rotation, inverse_frequencies, local_inverse_frequencies, rotation


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
        self._kinds = [_kind(config, layer) for layer in range(config.num_layers)]
        # Computed on the CPU: equal on every device, and on the meta device torch would import a compiler.
        local = local_inverse_frequencies(config)
        self.register_buffer("frequencies", inverse_frequencies(config).to(device), persistent=False)
        self.register_buffer("local_frequencies", None if local is None else local.to(device), persistent=False)

    def forward(self, positions: Tensor) -> list[Rotation | None]:
        """The rotation of tokens at ``positions`` [T] for each layer, computed once per kind; None: no rotation."""
        made: dict[str, Rotation | None] = {"none": None}
        if "all" in self._kinds:
            made["all"] = rotation(positions, self.frequencies, self._dtype, self._magnitude)
        if self.local_frequencies is not None:
            made["local"] = rotation(positions, self.local_frequencies, self._dtype)
        return [made[kind] for kind in self._kinds]


def _kind(config: ModelConfig, layer: int) -> str:
    if layer in config.unrotated_layers:
        return "none"
    return "local" if config.local_rope_theta is not None and config.window(layer) is not None else "all"
