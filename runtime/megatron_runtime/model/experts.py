"""A mixture of experts (Shazeer et al.; Jiang et al., Mixtral): each token visits the few networks chosen for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_runtime.model.config import ExpertsConfig
from megatron_runtime.model.layers import FeedForward, Linear
from megatron_runtime.model.shard import Shard


class Experts(nn.Module):
    """Stands where a `FeedForward` stands. Tokens are sorted by expert, so that each expert runs once per pass.

    A rank that has some of the experts, or a slice of each, gives its part of their sum; all ranks choose alike.
    """

    def __init__(self, shard: Shard, experts: ExpertsConfig, dtype: torch.dtype) -> None:
        super().__init__()
        config = shard.config
        self.per_token = experts.per_token
        self.normalize_weights = experts.normalize_weights
        self.count = experts.count
        self.here = shard.experts(experts)
        self.router = Linear(config.hidden_size, experts.count, bias=False, dtype=dtype)
        channels, adds_bias = len(shard.expert_channels(experts)), shard.position.expert_slice == 0
        self.networks = nn.ModuleList(FeedForward(config, channels, dtype, adds_bias=adds_bias) for _ in self.here)

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, hidden] to [T, hidden]."""
        weights, chosen = self._route(hidden)
        visits = chosen.flatten()
        counts = visits.bincount(minlength=self.count).tolist()
        before, counts = sum(counts[: self.here.start]), counts[self.here.start : self.here.stop]
        order = visits.argsort(stable=True)[before : before + sum(counts)]
        visitors = torch.split(hidden[order // self.per_token], counts)
        results = [network(rows) for network, rows in zip(self.networks, visitors, strict=True) if len(rows)]
        # Back in the order of the choices: a token's sum doesn't depend on which experts its neighbours visit.
        # An expert that is elsewhere adds nothing here.
        make = torch.empty if len(order) == len(visits) else torch.zeros
        visited = make(len(visits), hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
        if results:
            visited[order] = torch.cat(results)
        return (visited.view(*chosen.shape, -1) * weights[..., None]).sum(1)

    def _route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """How much of which experts each token gets, best first: two times [T, per_token]."""
        shares = torch.softmax(self.router(hidden).float(), dim=-1)
        weights, chosen = shares.topk(self.per_token, dim=-1)
        if self.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(hidden.dtype), chosen
