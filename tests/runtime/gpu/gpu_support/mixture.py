"""Random mixtures of experts, and their results in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu_support.row_references import ACTIVATIONS, clamped_gate
from torch import Tensor

from megatron_runtime.gpu import experts


@dataclass(frozen=True)
class MixtureCase:
    """Tokens with choices, and the networks of the experts from ``first`` on."""

    hidden: Tensor
    weights: Tensor
    chosen: Tensor
    matrices: tuple[list[Tensor], list[Tensor]]
    """Of gates and values, and of the results; the tensors of each expert."""
    biases: tuple[list[Tensor], list[Tensor]] | None
    activation: str
    first: int = 0
    is_gated: bool = True
    clamped: tuple[float, float] | None = None
    weights_inputs: bool = False
    shared: tuple[Tensor, Tensor | None] | None = None
    """The results of the shared expert, and the logits of its gate."""

    @classmethod
    def random(
        cls,
        tokens: int,
        experts: tuple[int, int],
        sizes: tuple[int, int],
        dtype: torch.dtype,
        *,
        activation: str = "silu",
        is_biased: bool = False,
        elsewhere: int = 0,
        shared: str = "",
        **options: Any,
    ) -> MixtureCase:
        """The same seed for all cases.

        Args:
            tokens: Their number.
            experts: Number of experts here, and of those of a token.
            sizes: Channels of a token, and of an expert.
            dtype: Of tokens and networks.
            activation: One of ACTIVATIONS.
            is_biased: Whether the products have biases.
            elsewhere: Number of experts before and of those after the ones here.
            shared: "plain" or "gated": that there is a shared expert.
            options: Further fields.
        """
        generator = torch.Generator().manual_seed(1)
        count, per_token = experts
        hidden, channels = sizes
        wide = channels * (2 if options.get("is_gated", True) else 1)

        def made(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * scale).to(dtype)

        scores = torch.rand(tokens, count + 2 * elsewhere, generator=generator)
        weights, chosen = scores.topk(per_token)
        return cls(
            made(tokens, hidden),
            weights / weights.sum(-1, keepdim=True),
            chosen,
            (
                [made(wide, hidden, scale=hidden**-0.5) for _ in range(count)],
                [made(hidden, channels, scale=channels**-0.5) for _ in range(count)],
            ),
            ([made(wide) for _ in range(count)], [made(hidden) for _ in range(count)]) if is_biased else None,
            activation,
            first=elsewhere,
            shared=(made(tokens, hidden), made(tokens, 1) if shared == "gated" else None) if shared else None,
            **options,
        )

    def on(self, device: torch.device) -> MixtureCase:
        """A copy on this device."""
        matrices, biases = (
            None if each is None else tuple([tensor.to(device) for tensor in part] for part in each)
            for each in (self.matrices, self.biases)
        )
        there = self._with(lambda each: each.to(device))
        return replace(there, matrices=matrices, biases=biases)

    def rows(self, start: int, stop: int) -> MixtureCase:
        """Some of the tokens."""
        return self._with(lambda each: each[start:stop])

    def _with(self, change: Callable[[Tensor], Tensor]) -> MixtureCase:
        """With other tensors of the tokens."""
        hidden, weights, chosen = map(change, (self.hidden, self.weights, self.chosen))
        shared = None
        if self.shared is not None:
            result, logits = self.shared
            shared = change(result), None if logits is None else change(logits)
        return replace(self, hidden=hidden, weights=weights, chosen=chosen, shared=shared)

    def process(self, tile_rows: int) -> Tensor:
        """By the kernels."""
        scattered = experts.ScatteredTensors.of
        networks = experts.ExpertNetworks(
            *(experts.ScatteredMatrices(scattered(part)) for part in self.matrices),
            *((None, None) if self.biases is None else map(scattered, self.biases)),
            is_gated=self.is_gated,
            activation=self.activation,
            clamped=self.clamped,
        )
        routing, options = (self.weights, self.chosen), {"weights_inputs": self.weights_inputs}
        return experts.process(self.hidden, routing, networks, self.first, tile_rows, shared=self.shared, **options)

    def expected(self) -> Tensor:
        """In float64, for tensors of the host."""
        total = torch.zeros(self.hidden.shape, dtype=torch.float64)
        for token, (chosen, weights) in enumerate(zip(self.chosen.tolist(), self.weights.double(), strict=True)):
            for expert, weight in zip(chosen, weights, strict=True):
                if 0 <= expert - self.first < len(self.matrices[0]):
                    given = self.hidden[token].double() * (weight if self.weights_inputs else 1)
                    result = self._network(given, expert - self.first)
                    total[token] += result * (1 if self.weights_inputs else weight)
        if self.shared is None:
            return total
        result, logits = self.shared
        return total + result.double() * (1 if logits is None else logits.double().sigmoid())

    def _network(self, given: Tensor, expert: int) -> Tensor:
        gate_up, down = (part[expert].double() for part in self.matrices)
        biases = [0, 0] if self.biases is None else [part[expert].double() for part in self.biases]
        widened = gate_up @ given + biases[0]
        if not self.is_gated:
            return down @ ACTIVATIONS[self.activation](widened) + biases[1]
        gate, value = widened.chunk(2)
        if self.clamped is None:
            return down @ (ACTIVATIONS[self.activation](gate) * value) + biases[1]
        return down @ clamped_gate(gate, value, *self.clamped) + biases[1]
