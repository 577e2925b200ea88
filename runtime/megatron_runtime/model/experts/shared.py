"""The expert that processes every token, in addition to the selected ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_runtime.model.config import ExpertsConfig
from megatron_runtime.model.kernels.row_kernels import sigmoid
from megatron_runtime.model.layers import FeedForward, Linear
from megatron_runtime.model.shard import Shard


class SharedExpert(nn.Module):
    """One feed-forward network for all shared experts of a layer (DeepSeek-AI, DeepSeekMoE); some have a sigmoid gate.

    A rank holds a slice of the network and returns its part of the result. The gate is on all ranks.
    """

    def __init__(self, shard: Shard, experts: ExpertsConfig, dtype: torch.dtype) -> None:
        super().__init__()
        config, channels = shard.config, len(shard.shared_expert_channels(experts))
        self.network = FeedForward(config, channels, dtype, adds_bias=shard.position.stage_rank == 0)
        self.gate: Linear | None = None
        if experts.has_shared_expert_gate:
            self.gate = Linear(config.hidden_size, 1, bias=False, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        result, logits = self.parts(hidden)
        return result if logits is None else sigmoid(logits) * result

    def parts(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """The result before the gate, [T, hidden], and the logit of the gate, [T, 1], if there is one."""
        return self.network(hidden), None if self.gate is None else self.gate(hidden)
