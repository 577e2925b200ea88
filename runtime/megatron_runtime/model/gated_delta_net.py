"""The module of gated delta layers (Yang et al., Gated Delta Networks), as Qwen3-Next has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.kv_cache import LayerCache
from megatron_runtime.model.layers import Linear, float32_weights
from megatron_runtime.model.positions import LayerPositions
from megatron_runtime.model.recurrence import DeltaInputs, RecurrentPlan, gated_rms_norm
from megatron_runtime.model.recurrent_config import GatedDeltaConfig


class GatedDeltaNet(nn.Module):
    """A convolution of queries, keys and values, the gated delta rule, and a norm with a gate.

    All between the projections is float32. Weights are uninitialized.
    """

    def __init__(self, config: ModelConfig, sizes: GatedDeltaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes = sizes
        self.inputs = Linear(config.hidden_size, 2 * sizes.keys + 2 * sizes.values, bias=False, dtype=dtype)
        """For each key head: its query and key, then the values and the gates of its value heads."""
        self.gates = Linear(config.hidden_size, 2 * sizes.value_heads, bias=False, dtype=dtype)
        """For each key head: the strengths, then the steps of its value heads."""
        self.convolution = float32_weights(sizes.taps, sizes.channels)
        self.log_rates = float32_weights(sizes.value_heads)
        self.step_biases = float32_weights(sizes.value_heads)
        self.norm = float32_weights(sizes.value_dim)
        self.eps = config.rms_norm_eps
        self.output = Linear(sizes.values, config.hidden_size, bias=False, dtype=dtype)

    def forward(self, hidden: Tensor, positions: LayerPositions, plan: RecurrentPlan, cache: LayerCache) -> Tensor:
        """[T, hidden] to [T, hidden]; updates the states in ``cache``."""
        del positions  # The order of the tokens is in the states.
        sizes, count = self.sizes, len(hidden)
        inputs_of_convolution, matrices = cache
        together = sizes.value_heads // sizes.key_heads
        projected = self.inputs(hidden).float().view(count, sizes.key_heads, -1)
        widths = [sizes.key_dim] * 2 + [together * sizes.value_dim] * 2
        queries, keys, values, gates = torch.split(projected, widths, dim=-1)
        strengths, steps = self.gates(hidden).float().view(count, sizes.key_heads, 2, together).unbind(2)
        mixed = torch.cat([each.flatten(1) for each in (queries, keys, values)], dim=1)
        no_bias = mixed.new_zeros(sizes.channels)
        mixed = plan.convolve(mixed, self.convolution, no_bias, inputs_of_convolution)
        queries, keys, values = torch.split(mixed, [sizes.keys, sizes.keys, sizes.values], dim=1)
        inputs = DeltaInputs(
            queries=queries.reshape(count, sizes.key_heads, sizes.key_dim),
            keys=keys.reshape(count, sizes.key_heads, sizes.key_dim),
            values=values.reshape(count, sizes.value_heads, sizes.value_dim),
            steps=steps.reshape(count, sizes.value_heads),
            strengths=strengths.reshape(count, sizes.value_heads),
            rates=self.log_rates.exp(),
            biases=self.step_biases,
        )
        seen = plan.delta_rule(inputs, matrices)
        seen = gated_rms_norm(seen, gates.reshape(seen.shape), self.norm, self.eps)
        result: Tensor = self.output(seen.flatten(1).to(hidden.dtype))
        return result
