"""The sizes of recurrent layers, and the states that they keep of each sequence. Without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from megatron_runtime.errors import CheckpointError

NO_DRAFTS = "has recurrent layers, whose states can't return to the token before a wrong draft"
_STATE_BYTES = 4
"""Of an element of a state, which is float32 for every dtype of the model."""
_LARGEST_STATE = 2**28


@dataclass(frozen=True)
class RecurrentConfig:
    """Layers with a linear recurrence in place of attention; its subclasses are the kinds of recurrences.

    Each head of values has a matrix, to which a token adds the product of its key and its value, and from which its
    query reads. A causal convolution of each channel precedes the recurrence. The queries and keys of a head serve
    several consecutive heads of values.
    """

    layers: frozenset[int]
    """The layers that have it."""
    key_heads: int
    value_heads: int
    key_dim: int
    """Channels of a query or key."""
    value_dim: int
    taps: int
    """Tokens that the convolution combines: the last one and those before it."""

    @property
    def keys(self) -> int:
        """Channels of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The float32 arrays of a sequence in one layer: the last inputs of the convolution, and the matrix of each
        head.
        """
        return (self.taps - 1, self.channels), (self.value_heads, self.key_dim, self.value_dim)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence in all layers."""
        return _STATE_BYTES * len(self.layers) * sum(map(math.prod, self.state_shapes))

    def can_divide(self, ranks: int) -> bool:
        """Whether ``ranks`` tensor-parallel ranks can have equal numbers of key heads, each with its value heads."""
        return self.key_heads % ranks == 0

    def divide(self, ranks: int) -> Self:
        """The heads of one of ``ranks`` tensor-parallel ranks."""
        return replace(self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)

    def check(self, source: str, num_layers: int) -> None:
        """Raise CheckpointError naming ``source`` when the numbers are inconsistent."""
        sizes = {
            "key heads of a recurrent layer": self.key_heads,
            "value heads of a recurrent layer": self.value_heads,
            "key head dimension of a recurrent layer": self.key_dim,
            "value head dimension of a recurrent layer": self.value_dim,
            "taps of the convolution less one": self.taps - 1,
            "elements of a recurrent state": self.value_heads * self.key_dim * self.value_dim,
        }
        for name, size in sizes.items():
            if not 1 <= size <= _LARGEST_STATE:
                raise CheckpointError(f"{source}: {name}: {size:,}, expected 1 to {_LARGEST_STATE:,}")
        if self.value_heads % self.key_heads:
            raise CheckpointError(
                f"{source}: {self.value_heads} value heads can't share {self.key_heads} key heads evenly; expected a "
                "multiple"
            )
        if not 1 <= len(self.layers) < num_layers:
            raise CheckpointError(
                f"{source}: {len(self.layers)} of {num_layers} layers are recurrent, expected 1 to {num_layers - 1}"
            )


@dataclass(frozen=True)
class GatedDeltaConfig(RecurrentConfig):
    """The gated delta rule (Yang et al., Gated Delta Networks)."""


@dataclass(frozen=True)
class Mamba2Config(RecurrentConfig):
    """The selective state space model of Mamba-2 (Dao and Gu, Transformers are SSMs).

    Its C, B and x are the queries, keys and values; the size of its state is that of a key.
    """

    has_bias: bool = False
    """Whether the projections have biases."""
    has_convolution_bias: bool = True
    step_limits: tuple[float, float] = (0.0, math.inf)
    """The time steps of the discretization are clipped to these."""

    def check(self, source: str, num_layers: int) -> None:
        """Raise CheckpointError naming ``source`` when the numbers are inconsistent."""
        super().check(source, num_layers)
        shortest, longest = self.step_limits
        if not 0.0 <= shortest < longest:
            raise CheckpointError(
                f"{source}: the limits of time steps are {shortest} and {longest}, expected 0 or more and a larger one"
            )
