"""Routers: they select the experts of each token and the weight of each expert's result.

A routing function is a subclass of `ExpertRouter`, registered in `_ROUTERS` under its name in `RoutingConfig.scores`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_runtime.model.config import ExpertsConfig, RoutingConfig, RoutingScores
from megatron_runtime.model.kernels.row_kernels import has_gpu_row_kernels, sigmoid
from megatron_runtime.model.layers import Linear

_SMALLEST_SUM = 1e-20
"""Added to the sum of a token's weights, which can be zero for sigmoids; too small to change any other sum."""


class Routing(NamedTuple):
    """The experts of T tokens, ``per_token`` for each."""

    weights: Tensor
    """float32 [T, per_token]."""
    chosen: Tensor
    """int64 [T, per_token], indices of experts."""


class ExpertRouter(nn.Module, ABC):
    """Scores every expert for each token and selects those that rank highest.

    All ranks that share a layer have the whole router. The weights are uninitialized until a checkpoint fills them.
    """

    def __init__(self, hidden_size: int, experts: ExpertsConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.per_token = experts.per_token
        self.routing = experts.routing
        self.dtype = torch.float32 if self.routing.in_float32 else dtype
        self.linear = Linear(hidden_size, experts.count, bias=self.routing.has_bias, dtype=self.dtype)
        self.selection_bias: nn.Parameter | None = None
        if self.routing.has_selection_bias:
            # bfloat16 can't resolve its differences between scores.
            self.selection_bias = nn.Parameter(torch.empty(experts.count, dtype=torch.float32), requires_grad=False)

    @abstractmethod
    def score(self, logits: Tensor) -> Tensor:
        """Scores from logits, both float32 [T, experts]. The weight of a selected expert is its score."""

    def rank(self, logits: Tensor, scores: Tensor) -> Tensor:
        """The values by which experts are selected, float32 [T, experts]: the scores plus the bias, if there is one."""
        del logits
        return scores if self.selection_bias is None else scores + self.selection_bias

    def forward(self, hidden: Tensor, replayed: Tensor | None = None, *, adds_shared: bool = False) -> Routing:
        """Route [T, hidden]; ``replayed`` [T, per_token] has the experts to choose, and -1 where the router chooses.

        ``adds_shared``, on a GPU: the result has a column more, of the expert after the last one, with weight one.
        """
        projected = self.linear(hidden.to(self.dtype))
        if has_gpu_row_kernels(projected):
            return self.choose_on_gpu(projected, replayed, adds_shared=adds_shared)
        logits = projected.float()
        scores = self.score(logits)
        ranking = self.rank(logits, scores)
        if self.routing.groups > 1:
            ranking = _within_best_groups(ranking, self.routing)
        chosen = ranking.topk(self.per_token, dim=-1).indices
        if replayed is not None:
            chosen = torch.where(replayed >= 0, replayed, chosen)
        weights = scores.gather(-1, chosen)
        if self.routing.normalize_weights:
            weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST_SUM)
        if self.routing.weight_multiplier != 1.0:
            weights = weights * self.routing.weight_multiplier
        return Routing(weights, chosen)

    def choose_on_gpu(self, logits: Tensor, replayed: Tensor | None, *, adds_shared: bool = False) -> Routing:
        """The same from logits [T, experts]; of experts that rank equally, the first are chosen."""
        from megatron_runtime.gpu import expert_choice  # Triton is not needed on other devices.

        routing = self.routing
        choice = expert_choice.Choice(
            self.per_token,
            routing.scores,
            routing.normalize_weights,
            routing.weight_multiplier,
            routing.groups,
            routing.groups_per_token,
            routing.group_scores == "top_2_sum",
            adds_shared,
        )
        return Routing(*expert_choice.route(logits, choice, self.selection_bias, replayed))


class SoftmaxRouter(ExpertRouter):
    """Scores are the softmax over all experts (Shazeer et al.; Jiang et al., Mixtral)."""

    def score(self, logits: Tensor) -> Tensor:
        """Probabilities that sum to one over the experts."""
        return torch.softmax(logits, dim=-1)


class SigmoidRouter(ExpertRouter):
    """Scores are the sigmoid of each logit (DeepSeek-AI, DeepSeek-V3; Llama 4)."""

    def score(self, logits: Tensor) -> Tensor:
        """Between zero and one, independent of the other experts."""
        return sigmoid(logits)

    def rank(self, logits: Tensor, scores: Tensor) -> Tensor:
        """By logits while their order is the same: the sigmoids of large logits round to the same number."""
        if self.selection_bias is None and self.routing.groups == 1:
            return logits
        return super().rank(logits, scores)


def _within_best_groups(ranking: Tensor, routing: RoutingConfig) -> Tensor:
    """``ranking`` [T, experts] with minus infinity outside each token's best groups (DeepSeek-AI, DeepSeek-V2)."""
    grouped = ranking.view(len(ranking), routing.groups, -1)
    scores = grouped.amax(-1) if routing.group_scores == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    best = scores.topk(routing.groups_per_token, dim=-1).indices
    is_excluded = torch.ones_like(scores, dtype=torch.bool).scatter(-1, best, False)
    return grouped.masked_fill(is_excluded[..., None], float("-inf")).flatten(-2)


_ROUTERS: dict[RoutingScores, type[ExpertRouter]] = {"softmax": SoftmaxRouter, "sigmoid": SigmoidRouter}


def make_router(hidden_size: int, experts: ExpertsConfig, dtype: torch.dtype) -> ExpertRouter:
    """The router that ``experts`` names; its weights are uninitialized."""
    return _ROUTERS[experts.routing.scores](hidden_size, experts, dtype)
