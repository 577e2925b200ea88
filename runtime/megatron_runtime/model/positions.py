"""What the layers of a decoder are told about the positions of a batch's tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.rotary import Rotation, inverse_frequencies, local_inverse_frequencies, rotation


class Positions(nn.Module):
    """Rotations per layer: most models turn every layer alike, some turn local layers otherwise, or some not at all."""

    frequencies: Tensor
    """float32 [rotated channels / 2]; kept apart from the weights' type, since positions need the precision."""
    local_frequencies: Tensor | None

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self._dtype = dtype
        self._magnitude = config.rope_scaling.magnitude
        self._kinds = [_kind(config, layer) for layer in range(config.num_layers)]
        # Worked out on the CPU: the same on every device, and the meta device would import a compiler for it.
        local = local_inverse_frequencies(config)
        self.register_buffer("frequencies", inverse_frequencies(config).to(device), persistent=False)
        self.register_buffer("local_frequencies", None if local is None else local.to(device), persistent=False)

    def forward(self, positions: Tensor) -> list[Rotation | None]:
        """For each layer the rotation of tokens at ``positions`` [T], made once per kind; None: nothing is turned."""
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
