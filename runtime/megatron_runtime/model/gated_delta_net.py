"""The module of gated delta layers (Yang et al., Gated Delta Networks), as Qwen3-Next and Qwen3.5 have them."""

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
        """The queries of all heads, then the keys, the values and the gates."""
        self.gates = Linear(config.hidden_size, 2 * sizes.value_heads, bias=False, dtype=dtype)
        """The strengths of all value heads, then the steps."""
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
        mixed, gates = torch.split(self.inputs(hidden).float(), [sizes.channels, sizes.values], dim=1)
        strengths, steps = self.gates(hidden).float().chunk(2, dim=1)
        mixed = plan.convolve(mixed.contiguous(), self.convolution, None, inputs_of_convolution)
        queries, keys, values = torch.split(mixed, [sizes.keys, sizes.keys, sizes.values], dim=1)
        inputs = DeltaInputs(
            queries=queries.view(count, sizes.key_heads, sizes.key_dim),
            keys=keys.view(count, sizes.key_heads, sizes.key_dim),
            values=values.view(count, sizes.value_heads, sizes.value_dim),
            steps=steps,
            strengths=strengths,
            rates=self.log_rates.exp(),
            biases=self.step_biases,
        )
        seen = plan.delta_rule(inputs, matrices)
        seen = gated_rms_norm(seen, gates.reshape(seen.shape), self.norm, self.eps)
        result: Tensor = self.output(seen.flatten(1).to(hidden.dtype))
        return result
