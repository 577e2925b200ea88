"""Routers: they choose the experts of each token and the weight of each expert's result.

A routing function is a subclass of `ExpertRouter`, registered in `_ROUTERS` under its name in `RoutingConfig.scores`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_runtime.model.config import ExpertsConfig
from megatron_runtime.model.layers import Linear


class Routing(NamedTuple):
    """The experts of T tokens, of which each has ``per_token``."""

    weights: Tensor
    """float32 [T, per_token]."""
    chosen: Tensor
    """int64 [T, per_token], numbers of experts."""


class ExpertRouter(nn.Module, ABC):
    """Scores every expert for each token and chooses those with the highest scores.

    All ranks that share a layer hold the whole router. The weights are uninitialized until a checkpoint fills them.
    """

    def __init__(self, hidden_size: int, experts: ExpertsConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.per_token = experts.per_token
        self.normalize_weights = experts.routing.normalize_weights
        self.linear = Linear(hidden_size, experts.count, bias=False, dtype=dtype)

    @abstractmethod
    def score(self, logits: Tensor) -> Tensor:
        """Scores from logits, both float32 [T, experts]; the weight of a chosen expert is its score."""

    def forward(self, hidden: Tensor) -> Routing:
        """Route [T, hidden]."""
        scores = self.score(self.linear(hidden).float())
        weights, chosen = scores.topk(self.per_token, dim=-1)
        if self.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(weights, chosen)


class SoftmaxRouter(ExpertRouter):
    """Scores are the softmax over all experts (Shazeer et al.; Jiang et al., Mixtral)."""

    def score(self, logits: Tensor) -> Tensor:
        """Probabilities that sum to one over the experts."""
        return torch.softmax(logits, dim=-1)


_ROUTERS: dict[str, type[ExpertRouter]] = {"softmax": SoftmaxRouter}


def make_router(hidden_size: int, experts: ExpertsConfig, dtype: torch.dtype) -> ExpertRouter:
    """The router that ``experts`` names; its weights are uninitialized."""
    return _ROUTERS[experts.routing.scores](hidden_size, experts, dtype)
