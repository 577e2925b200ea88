"""The hidden states of one request, pooled over its passes."""

from __future__ import annotations

from collections.abc import Sequence


class PooledStates:
    """Sums hidden states over passes.

    Args:
        pooling: "last" or "mean".
        num_tokens: Number of tokens of the prompt.
    """

    def __init__(self, pooling: str, num_tokens: int) -> None:
        self._divisor = num_tokens if pooling == "mean" else 1
        self._sums: list[float] | None = None

    def add(self, sums: Sequence[float]) -> None:
        """Add the sums of a pass, [hidden size]."""
        known = self._sums
        self._sums = list(sums) if known is None else [a + b for a, b in zip(known, sums, strict=True)]

    def reset(self) -> None:
        """Begin anew, because all tokens are computed again."""
        self._sums = None

    def embedding(self) -> list[float] | None:
        """[hidden size], not normalized; None before the first pass."""
        return None if self._sums is None else [value / self._divisor for value in self._sums]
