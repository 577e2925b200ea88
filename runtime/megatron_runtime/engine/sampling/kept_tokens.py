"""The scaled logits that truncations read: those of the most likely tokens where these suffice, otherwise all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.engine.sampling.top_k import top_k

_LOGITS_AT_ONCE = 1 << 20
"""Number of logits that are processed together, so that they stay in the processor's cache."""
_SUMMED_AT_ONCE = 512
"""Logits per partial sum of a row: the order of summation does not depend on the other rows."""
_BUCKETS = 1024
_BUCKETS_PER_NAT = 32


def row_groups(rows: NDArray[np.intp], vocabulary: int) -> Iterator[NDArray[np.intp]]:
    """The rows in groups whose logits fit into the cache."""
    size = max(1, _LOGITS_AT_ONCE // vocabulary)
    return (rows[start : start + size] for start in range(0, len(rows), size))


@dataclass(frozen=True)
class ScaledLogits:
    """(logits - maximum) / temperature of R rows of a batch."""

    logits: Tensor
    """float32 [S, vocab]."""
    rows: Tensor
    """int64 [R], rows of the logits."""
    top: Tensor
    """[R, 1], the maxima."""
    temperature: Tensor
    """[R, 1], above 0."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def vocabulary(self) -> int:
        """Columns of the logits."""
        return self.logits.shape[1]

    def take(self, rows: Tensor) -> ScaledLogits:
        """The same for some of the R rows, int64."""
        return ScaledLogits(self.logits, self.rows[rows], self.top[rows], self.temperature[rows])

    def all(self) -> Tensor:
        """All scaled logits: [R, vocab]."""
        # Subtracted first, so that no temperature makes the maximum overflow.
        return (self.logits[self.rows] - self.top).div_(self.temperature)

    def top_k(self, width: int) -> tuple[Tensor, Tensor]:
        """The largest scaled logits in descending order, [R, width], and their tokens."""
        values, columns = top_k(self.logits[self.rows], width)
        return (values - self.top) / self.temperature, columns

    def log_normalizer(self, least: Tensor) -> Tensor:
        """The logarithm of the sum of exponentials of the scaled logits that are at least ``least``, [R, 1]: [R, 1]."""
        sums = torch.empty_like(least)
        for group in row_groups(np.arange(len(self)), self.vocabulary):
            index = torch.from_numpy(group).to(least.device)
            sums[index] = exclude_below(self.take(index).all(), least[index]).logsumexp(dim=-1, keepdim=True)
        return sums

    def standard_deviation(self) -> Tensor:
        """The standard deviation of the finite logits, over the temperature: [R, 1]. Its bits do not depend on other
        rows."""
        squares = torch.empty_like(self.top)
        for group in row_groups(np.arange(len(self)), self.vocabulary):
            index = torch.from_numpy(group).to(squares.device)
            part = self.take(index)
            values = part.logits[part.rows].sub_(part.top)
            possible = ~values.isneginf()
            count = possible.sum(dim=-1, keepdim=True)
            deviations = torch.where(possible, values - _row_sum(values.masked_fill_(~possible, 0)) / count, 0)
            squares[index] = _row_sum(deviations.square_()) / count
        return squares.sqrt_() / self.temperature


class KeptTokens:
    """The tokens of R rows that have been kept so far.

    This class itself is for rows whose truncations do not rank tokens; its subclasses support ranking.

    Args:
        logits: The scaled logits of the rows.
        least: [R, 1], the lowest kept scaled logit; None keeps all.
    """

    def __init__(self, logits: ScaledLogits, least: Tensor | None = None) -> None:
        self.logits = logits
        self.least = torch.full_like(logits.top, -torch.inf) if least is None else least

    def nth_largest(self, counts: NDArray[Any]) -> Tensor:
        """The n-th largest scaled logit, [R, 1], for ``counts`` n, [R]."""
        raise NotImplementedError("a truncation that ranks tokens has to declare ranks = True")

    def nucleus(self, masses: NDArray[Any]) -> Tensor:
        """The lowest scaled logit, [R, 1], of the most likely kept tokens whose total share of the probability is
        ``masses``, [R]."""
        raise NotImplementedError("a truncation that ranks tokens has to declare ranks = True")

    def column(self, values: NDArray[Any]) -> Tensor:
        """Values [R] as a tensor [R, 1] on the device of the logits."""
        return torch.from_numpy(values).to(self.least)[:, None]

    def take(self, rows: Tensor) -> KeptTokens:
        """The same for some of the R rows, int64."""
        return KeptTokens(self.logits.take(rows), self.least[rows])

    def exclude_below(self, threshold: Tensor, rows: Tensor | None = None) -> None:
        """Raise the lowest kept scaled logit to a threshold, [N, 1], in some of the R rows, int64 [N], or in all."""
        if rows is None:
            self.least = torch.maximum(self.least, threshold)
        else:
            self.least[rows] = torch.maximum(self.least[rows], threshold)


class RankedTokens(KeptTokens):
    """R rows, given by their W most likely tokens.

    Args:
        logits: The scaled logits of the rows.
        scaled: [R, W], in descending order.
        is_bounded: bool [R], rows in which a truncation keeps fewer than W distinct logits, before ``nucleus``.
        least: As in KeptTokens.
    """

    def __init__(self, logits: ScaledLogits, scaled: Tensor, is_bounded: Tensor, least: Tensor | None = None) -> None:
        super().__init__(logits, least)
        self._scaled = scaled
        self._is_bounded = is_bounded

    def nth_largest(self, counts: NDArray[Any]) -> Tensor:
        """As in KeptTokens; n is below W."""
        places = torch.from_numpy(counts.astype(np.int64) - 1).to(self._scaled.device)
        return self._scaled.gather(1, places[:, None])

    def nucleus(self, masses: NDArray[Any]) -> Tensor:
        """As in KeptTokens, or the last of the W if their total share is lower."""
        scaled = self._scaled
        shares = torch.where(scaled < self.least, 0, (scaled - self._log_normalizer()).exp_()).cumsum(dim=-1)
        last = (shares < self.column(masses)).sum(dim=-1, keepdim=True).clamp_(max=scaled.shape[1] - 1)
        return scaled.gather(1, last)

    def take(self, rows: Tensor) -> RankedTokens:
        """The same for some of the R rows, int64."""
        return RankedTokens(self.logits.take(rows), self._scaled[rows], self._is_bounded[rows], self.least[rows])

    def _log_normalizer(self) -> Tensor:
        """The logarithm of the sum of exponentials over the kept tokens: [R, 1]."""
        normalizer = exclude_below(self._scaled, self.least).logsumexp(dim=-1, keepdim=True)
        (unbounded,) = torch.where(~self._is_bounded)
        if len(unbounded):
            normalizer[unbounded] = self.logits.take(unbounded).log_normalizer(self.least[unbounded])
        return normalizer


class AllTokens(KeptTokens):
    """R rows, given by all tokens of the vocabulary in order.

    Args:
        logits: The scaled logits of the rows.
        scaled: [R, vocab].
        least: As in KeptTokens.
    """

    def __init__(self, logits: ScaledLogits, scaled: Tensor, least: Tensor | None = None) -> None:
        super().__init__(logits, least)
        self._scaled = scaled

    def nth_largest(self, counts: NDArray[Any]) -> Tensor:
        """As in KeptTokens; n may exceed the vocabulary."""
        wanted = self.column(np.minimum(counts, self._scaled.shape[1]))
        return _value_at_sum(self._scaled, torch.ones_like(self._scaled), wanted)

    def nucleus(self, masses: NDArray[Any]) -> Tensor:
        """As in KeptTokens."""
        scaled = exclude_below(self._scaled, self.least)
        return _value_at_sum(scaled, scaled.softmax(dim=-1), self.column(masses))

    def take(self, rows: Tensor) -> AllTokens:
        """The same for some of the R rows, int64."""
        return AllTokens(self.logits.take(rows), self._scaled[rows], self.least[rows])


def _row_sum(values: Tensor) -> Tensor:
    """[R, vocab] to [R, 1]. Uses partial sums, because torch divides one sum among threads by the number of rows."""
    whole = values.shape[1] // _SUMMED_AT_ONCE * _SUMMED_AT_ONCE
    parts = values[:, :whole].reshape(len(values), -1, _SUMMED_AT_ONCE).sum(dim=2)
    return parts.sum(dim=1, keepdim=True) + values[:, whole:].sum(dim=1, keepdim=True)


def exclude_below(scaled: Tensor, least: Tensor) -> Tensor:
    """Scaled logits [R, W], with -inf in place of those below ``least``, [R, 1]."""
    return scaled if bool(least.isneginf().all()) else torch.where(scaled < least, -torch.inf, scaled)


def _value_at_sum(scaled: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """The scaled logit, [R, 1], at which the cumulative weight of the most likely tokens reaches the target, [R, 1].

    The vocabulary is not sorted, but divided into buckets by value. Only the bucket in which the sum reaches the target
    is sorted.

    Args:
        scaled: [R, vocab].
        weights: [R, vocab].
        target: [R, 1].
    """
    bucket = scaled.mul(-_BUCKETS_PER_NAT).clamp_(max=_BUCKETS - 1).long()
    masses = scaled.new_zeros(len(scaled), _BUCKETS).scatter_add_(1, bucket, weights).cumsum(dim=-1)
    reached = (masses < target).sum(dim=-1, keepdim=True).clamp_(max=_BUCKETS - 1)
    before = torch.where(reached > 0, masses.gather(1, (reached - 1).clamp(min=0)), 0)
    inside = bucket == reached
    width = max(1, int(inside.sum(dim=-1).max()))
    best, columns = top_k(torch.where(inside, scaled, -torch.inf), width)
    mass = weights.gather(1, columns).cumsum(dim=-1) + before
    found = inside.sum(dim=-1, keepdim=True)
    last = torch.minimum((mass < target).sum(dim=-1, keepdim=True), (found - 1).clamp(min=0))
    return best.gather(1, last)
