"""The selected experts of each token in the KV cache."""

from __future__ import annotations

from collections.abc import Sequence as Slices
from typing import Any

import torch
from torch import Tensor

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.scheduling.sequence import Sequence, SequenceSlice
from megatron_runtime.errors import ConfigurationError, InvalidRequestError
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.host_memory import zeros
from megatron_runtime.model.routing_tape import RoutingTape
from megatron_runtime.model.shard import Shard


class ExpertRouting:
    """Records the routing of tokens, and replays the routing of requests that have one.

    The record has one entry per slot of the KV cache, in host memory. So a block of the prefix cache keeps its routing
    with its keys and values.

    Args:
        model: The sizes of the model.
        shard: This rank's part of it.
        config: Says whether routing is recorded.
        num_blocks: Blocks of the KV cache.

    Raises:
        ConfigurationError: Recording is enabled, but the model has no experts, or its layers are in several pipeline
            stages.
    """

    def __init__(self, model: ModelConfig, shard: Shard, config: InferenceConfig, num_blocks: int) -> None:
        self._experts = model.experts
        self._num_layers = sum(model.experts_of(layer) is not None for layer in range(model.num_layers))
        self._block_size = config.block_size_tokens
        self._has_stages = shard.position.sizes.pipeline > 1
        self._chosen: Tensor | None = None
        if not config.moe_enable_routing_replay:
            return
        problem = "the model has no experts" if self._experts is None else None
        problem = "the layers are in several pipeline stages; use 1" if self._has_stages else problem
        if problem is not None or self._experts is None:
            raise ConfigurationError(f"moe_enable_routing_replay=True: {problem}", field="moe_enable_routing_replay")
        slots = num_blocks * self._block_size
        self._chosen = zeros((slots, self._num_layers, self._experts.per_token), torch.int16)

    def parse(self, routing: Any) -> Tensor | None:
        """The routing of a request, int64 [tokens, layers with experts, experts per token]; None if it has none.

        Raises:
            InvalidRequestError: It does not fit the model.
        """
        if routing is None:
            return None
        if self._experts is None or self._has_stages:
            why = "the model has no experts" if self._experts is None else "the layers are in several pipeline stages"
            raise InvalidRequestError(f"replayed_routing: {why}; leave it out", field="replayed_routing")
        expected = (self._num_layers, self._experts.per_token)
        try:
            parsed = torch.as_tensor(routing, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidRequestError(f"replayed_routing: {error}", field="replayed_routing") from error
        if parsed.dim() != 3 or parsed.shape[1:] != expected:
            raise InvalidRequestError(
                f"replayed_routing has shape {list(parsed.shape)}, expected [tokens, {expected[0]} layers, "
                f"{expected[1]} experts]",
                field="replayed_routing",
            )
        _check_experts(parsed, self._experts.count)
        return parsed

    def tape(self, slices: Slices[SequenceSlice], device: torch.device) -> RoutingTape | None:
        """The tape of a pass over the slices; None if nothing is recorded or replayed."""
        if any(part.sequence.replayed_routing is not None for part in slices):
            return RoutingTape(torch.cat([self._replayed(part) for part in slices]).to(device))
        return None if self._chosen is None else RoutingTape()

    def store(self, slots: Tensor, tape: RoutingTape | None) -> None:
        """Record the experts of the tokens in these slots, as selected in a pass."""
        if self._chosen is not None and tape is not None:
            self._chosen[slots.cpu()] = tape.chosen()

    def of(self, sequence: Sequence) -> Tensor | None:
        """int32 [computed tokens, layers with experts, experts per token] of a running sequence, if it is recorded."""
        if self._chosen is None or not sequence.is_running:
            return None
        blocks = torch.tensor(sequence.blocks)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        return self._chosen[slots[: sequence.num_computed]].to(torch.int32)

    def _replayed(self, part: SequenceSlice) -> Tensor:
        """int64 [tokens of the slice, layers, experts], -1 after the end of the sequence's routing."""
        assert self._experts is not None
        rows = torch.full((part.length, self._num_layers, self._experts.per_token), -1, dtype=torch.int64)
        routing = part.sequence.replayed_routing
        if routing is not None:
            known = routing[part.start : part.end]
            rows[: len(known)] = known
        return rows


def _check_experts(routing: Tensor, count: int) -> None:
    if routing.numel() and not 0 <= int(routing.min()) <= int(routing.max()) < count:
        wrong = int(routing[(routing < 0) | (routing >= count)][0])
        raise InvalidRequestError(
            f"replayed_routing: {wrong} is not an expert; the model has 0 to {count - 1}", field="replayed_routing"
        )
    ordered = routing.sort(dim=-1).values
    if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise InvalidRequestError(
            "replayed_routing: a token has an expert twice in a layer; its experts must differ",
            field="replayed_routing",
        )
