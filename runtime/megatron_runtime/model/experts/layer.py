"""A mixture of experts (Shazeer et al.; Jiang et al., Mixtral): a few experts process each token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from megatron_runtime.model.config import ExpertsConfig
from megatron_runtime.model.experts.grouped import group_networks
from megatron_runtime.model.experts.routing import Routing, make_router
from megatron_runtime.model.experts.shared import SharedExpert
from megatron_runtime.model.kernels.row_kernels import has_gpu_row_kernels
from megatron_runtime.model.layers import FeedForward
from megatron_runtime.model.quantized.float8_linear import Float8Linear
from megatron_runtime.model.routing_tape import RoutingTape
from megatron_runtime.model.shard import Shard
from megatron_runtime.parallel.ranks import Ranks

if TYPE_CHECKING:
    from megatron_runtime.gpu.experts import ExpertNetworks


class Experts(nn.Module):
    """Replaces a `FeedForward`: the weighted sum of a token's selected experts, and the shared expert.

    Tokens are sorted by expert, so that each expert runs once per pass; on a GPU all of them run together. A rank holds
    some of the experts, or a slice of each, and returns its part of their sum. All ranks select the same experts.
    Copies of the dense layers may differ in the last bits on different processors, so then one rank selects for all.
    """

    rows_together: int | None = None
    """Not None: on a GPU the bits of a token's result do not depend on the number of tokens, as in `products.linear`"""

    def __init__(self, shard: Shard, experts: ExpertsConfig, dtype: torch.dtype, ranks: Ranks) -> None:
        super().__init__()
        config = shard.config
        self.hidden_size = config.hidden_size
        self.per_token = experts.per_token
        self.count = experts.count
        self.weights_inputs = experts.routing.weights_inputs
        self.here = shard.experts(experts)
        self.router = make_router(config.hidden_size, experts, dtype)
        self.ranks = ranks
        channels, adds_bias = len(shard.expert_channels(experts)), shard.position.expert_slice == 0
        self._make_network = partial(FeedForward, config, channels, dtype, adds_bias=adds_bias)
        self.networks = nn.ModuleList(self._make_network() for _ in self.here)
        self.shared = SharedExpert(shard, experts, dtype) if experts.shared_intermediate_size else None
        self._can_join = (
            self.shared is not None
            and self.shared.gate is None
            and not config.mlp_bias
            and experts.shared_intermediate_size == experts.intermediate_size
            and len(self.here) == experts.count
            and ranks.position.stage_peers == ranks.position.tensor_peers
        )
        """Whether the shared expert has the sizes of the others, which are all here, and nothing more."""
        self._grouped: ExpertNetworks | str | None = None
        self._joined: ExpertNetworks | str | None = None

    def forward(self, hidden: Tensor, tape: RoutingTape | None = None) -> Tensor:
        """[T, hidden] to [T, hidden]; ``tape`` has the choices to replay, and records them."""
        if has_gpu_row_kernels(hidden) and not isinstance(networks := self.grouped(), str):
            return self._process_together(hidden, tape, networks)
        chosen = self._process_each(hidden, self._choose(hidden, tape))
        return chosen if self.shared is None else chosen + self.shared(hidden)

    def grouped(self) -> ExpertNetworks | str:
        """The networks for the kernels of `gpu.experts`, or why a pass has to wait until the host knows the choices."""
        if self._grouped is None:
            self._grouped = group_networks(list(self.networks))
            if self.shared is not None and self._can_join:
                self._joined = group_networks([*self.networks, self.shared.network])
        return self._grouped

    def _joined_networks(self, tokens: int) -> ExpertNetworks | None:
        """Those of the experts and of the shared one after them, as one of them; None if it is computed on its own."""
        from megatron_runtime.gpu import experts  # Triton is not needed on other devices.

        if isinstance(self._joined, str) or self.rows_together is not None or tokens > experts.JOINED_TOKENS:
            return None
        return self._joined

    def use_kernels(self, hidden: Tensor) -> None:
        """Launch the kernels of all numbers of tokens on [1, hidden], which is on a GPU, with other weights."""
        from megatron_runtime.gpu import experts  # Triton is not needed on other devices.

        with hidden.device:
            network = self._make_network()
            for name, linear in self.networks[0].named_children():
                if isinstance(linear, Float8Linear):
                    setattr(network, name, linear.like())
        for weight in network.parameters():
            weight.zero_()
        networks = group_networks([network] * len(self.here))
        if isinstance(networks, str):
            return
        logits = torch.zeros(1, self.count, dtype=self.router.dtype, device=hidden.device)
        replayed = torch.full((1, self.per_token), -1, dtype=torch.int64, device=hidden.device)
        self.router.choose_on_gpu(logits, replayed)
        routing = self.router.choose_on_gpu(logits, None)
        use = partial(experts.use_kernels, weights_inputs=self.weights_inputs)
        gates_shared = None if self.shared is None else self.shared.gate is not None
        use(hidden, routing, networks, self.here.start, gates_shared=gates_shared)
        if self._can_join and not isinstance(joined := group_networks([network] * (len(self.here) + 1)), str):
            self.router.choose_on_gpu(logits, replayed, adds_shared=True)
            routing = self.router.choose_on_gpu(logits, None, adds_shared=True)
            use(hidden, routing, joined, self.here.start, gates_shared=None, tiles=experts.TILE_ROWS[:1])

    def find_weights_again(self) -> None:
        """To be called after the memory of the weights has moved other than by methods of a Module."""
        self._grouped = self._joined = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.find_weights_again()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def _process_together(self, hidden: Tensor, tape: RoutingTape | None, networks: ExpertNetworks) -> Tensor:
        from megatron_runtime.gpu import experts

        joined = self._joined_networks(len(hidden))
        routing = self._choose(hidden, tape, adds_shared=joined is not None)
        process = partial(experts.process, weights_inputs=self.weights_inputs)
        if joined is not None:
            return process(hidden, routing, joined, self.here.start, experts.TILE_ROWS[0])
        rows = experts.tile_rows(routing.chosen.numel(), self.count)
        rows = rows if self.rows_together is None else experts.FIXED_TILE_ROWS
        shared = None if self.shared is None else self.shared.parts(hidden)
        return process(hidden, routing, networks, self.here.start, rows, shared=shared)

    def _process_each(self, hidden: Tensor, routing: Routing) -> Tensor:
        """One expert after the other."""
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

    def _choose(self, hidden: Tensor, tape: RoutingTape | None, *, adds_shared: bool = False) -> Routing:
        routing = self._route(hidden, None if tape is None else tape.replayed(), adds_shared=adds_shared)
        if tape is not None:
            tape.note(routing.chosen[:, : self.per_token])
        return routing

    def _route(self, hidden: Tensor, replayed: Tensor | None = None, *, adds_shared: bool = False) -> Routing:
        position = self.ranks.position
        if position.stage_peers == position.tensor_peers:
            routing: Routing = self.router(hidden, replayed, adds_shared=adds_shared)
            return routing
        # The sum with zeros is exact, also for expert indices in float32.
        mine = torch.zeros(len(hidden), 2 * self.per_token, device=hidden.device)
        if position.stage_rank == 0:
            mine = torch.cat(self.router(hidden, replayed), dim=-1)
        weights, chosen = self.ranks.sum_experts(mine).chunk(2, dim=-1)
        return Routing(weights, chosen.long())
