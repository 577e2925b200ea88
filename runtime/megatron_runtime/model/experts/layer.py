"""A mixture of experts (Shazeer et al.; Jiang et al., Mixtral): a few experts process each token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_runtime.model.config import ExpertsConfig
from megatron_runtime.model.experts.routing import Routing, make_router
from megatron_runtime.model.experts.shared import SharedExpert
from megatron_runtime.model.layers import FeedForward
from megatron_runtime.model.routing_tape import RoutingTape
from megatron_runtime.model.shard import Shard
from megatron_runtime.parallel.ranks import Ranks


class Experts(nn.Module):
    """Replaces a `FeedForward`: the weighted sum of a token's selected experts, and the shared expert.

    Tokens are sorted by expert, so that each expert runs once per pass. A rank holds some of the experts, or a slice of
    each, and returns its part of their sum. All ranks select the same experts. Copies of the dense layers may differ in
    the last bits on different processors, so then one rank selects for all.
    """

    def __init__(self, shard: Shard, experts: ExpertsConfig, dtype: torch.dtype, ranks: Ranks) -> None:
        super().__init__()
        config = shard.config
        self.per_token = experts.per_token
        self.count = experts.count
        self.weights_inputs = experts.routing.weights_inputs
        self.here = shard.experts(experts)
        self.router = make_router(config.hidden_size, experts, dtype)
        self.ranks = ranks
        channels, adds_bias = len(shard.expert_channels(experts)), shard.position.expert_slice == 0
        self.networks = nn.ModuleList(FeedForward(config, channels, dtype, adds_bias=adds_bias) for _ in self.here)
        self.shared = SharedExpert(shard, experts, dtype) if experts.shared_intermediate_size else None

    def forward(self, hidden: Tensor, tape: RoutingTape | None = None) -> Tensor:
        """[T, hidden] to [T, hidden]; ``tape`` has the choices to replay, and records them."""
        chosen = self._process_chosen(hidden, tape)
        return chosen if self.shared is None else chosen + self.shared(hidden)

    def _process_chosen(self, hidden: Tensor, tape: RoutingTape | None) -> Tensor:
        routing = self._route(hidden, None if tape is None else tape.replayed())
        if tape is not None:
            tape.note(routing.chosen)
        weights, chosen = routing.weights.to(hidden.dtype), routing.chosen
        visits = chosen.flatten()
        counts = visits.bincount(minlength=self.count).tolist()
        before, counts = sum(counts[: self.here.start]), counts[self.here.start : self.here.stop]
        order = visits.argsort(stable=True)[before : before + sum(counts)]
        inputs = hidden[order // self.per_token]
        if self.weights_inputs:
            inputs = inputs * weights.flatten()[order, None]
        visitors = torch.split(inputs, counts)
        results = [network(rows) for network, rows in zip(self.networks, visitors, strict=True) if len(rows)]
        # In the order of the selection again, so that a token's sum doesn't depend on the experts of other tokens. An
        # expert on another rank adds nothing here.
        make = torch.empty if len(order) == len(visits) else torch.zeros
        visited = make(len(visits), hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
        if results:
            visited[order] = torch.cat(results)
        visited = visited.view(*chosen.shape, -1)
        return (visited if self.weights_inputs else visited * weights[..., None]).sum(1)

    def _route(self, hidden: Tensor, replayed: Tensor | None = None) -> Routing:
        position = self.ranks.position
        if position.stage_peers == position.tensor_peers:
            routing: Routing = self.router(hidden, replayed)
            return routing
        # The sum with zeros is exact, also for expert indices in float32.
        mine = torch.zeros(len(hidden), 2 * self.per_token, device=hidden.device)
        if position.stage_rank == 0:
            mine = torch.cat(self.router(hidden, replayed), dim=-1)
        weights, chosen = self.ranks.sum_experts(mine).chunk(2, dim=-1)
        return Routing(weights, chosen.long())
