"""The module of Mamba-2 layers (Dao and Gu, Transformers are SSMs), as Nemotron-H has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.kv_cache import LayerCache
from megatron_runtime.model.layers import Linear, float32_weights
from megatron_runtime.model.positions import LayerPositions
from megatron_runtime.model.recurrence import RecurrentPlan, ScanInputs, gated_group_norm
from megatron_runtime.model.recurrent_config import Mamba2Config


class Mamba2(nn.Module):
    """A convolution of values, keys and queries, the selective state space model, and a norm of the gated result over
    the values of each key head.

    All between the projections is float32. Weights are uninitialized. ``adds_bias``: whether this rank adds the bias of
    the output, if there is one.
    """

    def __init__(self, config: ModelConfig, sizes: Mamba2Config, dtype: torch.dtype, *, adds_bias: bool = True) -> None:
        super().__init__()
        self.sizes = sizes
        self.widths = [sizes.values, sizes.channels, sizes.value_heads]
        """Of the gates, of the inputs of the convolution and of the steps: the outputs of ``inputs``."""
        self.inputs = Linear(config.hidden_size, sum(self.widths), bias=sizes.has_bias, dtype=dtype)
        self.convolution = float32_weights(sizes.taps, sizes.channels)
        self.convolution_bias = float32_weights(sizes.channels) if sizes.has_convolution_bias else None
        self.log_rates = float32_weights(sizes.value_heads)
        self.step_biases = float32_weights(sizes.value_heads)
        self.skips = float32_weights(sizes.value_heads)
        self.norm = float32_weights(sizes.values)
        self.eps = config.rms_norm_eps
        self.output = Linear(sizes.values, config.hidden_size, bias=sizes.has_bias and adds_bias, dtype=dtype)

    def forward(self, hidden: Tensor, positions: LayerPositions, plan: RecurrentPlan, cache: LayerCache) -> Tensor:
        """[T, hidden] to [T, hidden]; updates the states in ``cache``."""
        del positions  # The order of the tokens is in the states.
        sizes, count = self.sizes, len(hidden)
        inputs_of_convolution, matrices = cache
        gates, mixed, steps = torch.split(self.inputs(hidden).float(), self.widths, dim=1)
        mixed = plan.convolve(mixed.contiguous(), self.convolution, self.convolution_bias, inputs_of_convolution)
        values, keys, queries = torch.split(mixed, [sizes.values, sizes.keys, sizes.keys], dim=1)
        inputs = ScanInputs(
            queries=queries.view(count, sizes.key_heads, sizes.key_dim),
            keys=keys.view(count, sizes.key_heads, sizes.key_dim),
            values=values.view(count, sizes.value_heads, sizes.value_dim),
            steps=steps,
            rates=self.log_rates.exp(),
            biases=self.step_biases,
            skips=self.skips,
            limits=sizes.step_limits,
        )
        seen = plan.selective_scan(inputs, matrices)
        grouped = (count, sizes.key_heads, -1)
        seen = gated_group_norm(
            seen.view(grouped), gates.reshape(grouped), self.norm.view(sizes.key_heads, -1), self.eps
        )
        result: Tensor = self.output(seen.flatten(1).to(hidden.dtype))
        return result
