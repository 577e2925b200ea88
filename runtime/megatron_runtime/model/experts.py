"""A mixture of experts (Shazeer et al.; Jiang et al., Mixtral): each token visits the few networks chosen for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_runtime.model.config import ExpertsConfig, ModelConfig
from megatron_runtime.model.layers import FeedForward, Linear


class Experts(nn.Module):
    """Stands where a `FeedForward` stands. Tokens are sorted by expert, so that each expert runs once per pass."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.per_token = experts.per_token
        self.normalize_weights = experts.normalize_weights
        self.router = Linear(config.hidden_size, experts.count, bias=False, dtype=dtype)
        self.networks = nn.ModuleList(
            FeedForward(config, experts.intermediate_size, dtype) for _ in range(experts.count)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        weights, chosen = self._route(hidden)
        visits = chosen.flatten()
        order = visits.argsort(stable=True)
        counts = visits.bincount(minlength=len(self.networks)).tolist()
        visitors = torch.split(hidden[order // self.per_token], counts)
        results = [network(rows) for network, rows in zip(self.networks, visitors, strict=True) if len(rows)]
        # Back in the order of the choices: a token's sum doesn't depend on which experts its neighbours visit.
        visited = torch.empty(len(visits), hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
        visited[order] = torch.cat(results)
        return (visited.view(*chosen.shape, -1) * weights[..., None]).sum(1)

    def _route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """How much of which experts each token gets, best first: two times [T, per_token]."""
        shares = torch.softmax(self.router(hidden).float(), dim=-1)
        weights, chosen = shares.topk(self.per_token, dim=-1)
        if self.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(hidden.dtype), chosen
