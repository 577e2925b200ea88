"""Filters that keep the most likely tokens, each given by a threshold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from megatron_runtime.engine.sampling.filters.protocol import FilterRequest, LogitsFilter
from megatron_runtime.engine.sampling.kept_tokens import KeptTokens


class Truncation(LogitsFilter, ABC):
    """A filter that excludes the tokens below a threshold. Each row has one parameter; 0 disables the filter.

    Tokens that equal the threshold are kept, so that the result does not depend on the order of equal tokens. The most
    likely token is always kept, so greedy rows need no truncation.
    """

    parameters: ClassVar[tuple[str, ...]]
    dtype: ClassVar[DTypeLike] = np.float32
    ranks: ClassVar[bool] = False
    """Whether the threshold depends on the order of the tokens: whether ``threshold`` uses ``nth_largest`` or
    ``nucleus``."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        del vocab_size
        self.values: NDArray[Any] = np.zeros(num_rows, self.dtype)

    @abstractmethod
    def threshold(self, kept: KeptTokens) -> Tensor:
        """The lowest kept scaled logit: [R, 1]. All rows use the filter."""

    @classmethod
    def of(cls, values: NDArray[Any]) -> Self:
        """The filter with the given parameter of each row of a batch."""
        batch = cls.__new__(cls)
        batch.values = values
        return batch

    @property
    def active(self) -> NDArray[np.bool_]:
        """[S], the rows that use the filter."""
        active: NDArray[np.bool_] = self.values > 0
        return active

    @property
    def most_kept(self) -> NDArray[Any] | None:
        """[S], the maximum number of distinct logits that are kept; 0 where the parameter does not determine it. None:
        for all."""
        return None

    @property
    def is_used(self) -> bool:
        """Whether any row has a parameter that is not 0."""
        return bool(self.values.any())

    def set_row(self, row: int, request: FilterRequest) -> None:
        """Read the request's parameter."""
        self.values[row] = getattr(request.params, self.parameters[0])

    def for_rows(self, rows: NDArray[np.intp]) -> Truncation | None:
        """The filter with the parameters of some rows; None if none of them uses it."""
        if not self.is_used:
            return None
        batch = self.take(rows)
        return batch if batch.active.any() else None

    def take(self, rows: NDArray[np.intp]) -> Self:
        """The filter with the parameters of some rows."""
        return self.of(self.values[rows])


class TopNSigma(Truncation):
    """Keeps tokens whose logit is at most n standard deviations of the logits below the maximum (Tang et al. 2024).

    The logits and their deviation are those before the temperature, so the temperature does not change which are kept.
    """

    parameters = ("top_n_sigma",)

    def set_row(self, row: int, request: FilterRequest) -> None:
        """Read n, which has no upper limit."""
        self.values[row] = min(request.params.top_n_sigma, float(np.finfo(np.float32).max))

    def threshold(self, kept: KeptTokens) -> Tensor:
        """Relative to the maximum, and divided by the temperature like the scaled logits."""
        return kept.column(self.values).neg() * kept.logits.standard_deviation()


class TopK(Truncation):
    """Keeps the k most likely tokens."""

    parameters = ("top_k",)
    dtype = np.int32
    ranks = True

    def set_row(self, row: int, request: FilterRequest) -> None:
        """Read k, which has no upper limit."""
        self.values[row] = min(request.params.top_k, np.iinfo(np.int32).max)

    @property
    def most_kept(self) -> NDArray[Any]:
        """[S], k."""
        return self.values

    def threshold(self, kept: KeptTokens) -> Tensor:
        """The k-th largest scaled logit."""
        return kept.nth_largest(self.values)


class TopP(Truncation):
    """Keeps the fewest most likely tokens whose probabilities add up to p (Holtzman et al. 2020); 1 keeps all."""

    parameters = ("top_p",)
    ranks = True

    @property
    def active(self) -> NDArray[np.bool_]:
        """[S], the rows with a p between 0 and 1."""
        active: NDArray[np.bool_] = (self.values > 0) & (self.values < 1)
        return active

    def threshold(self, kept: KeptTokens) -> Tensor:
        """The scaled logit of the least likely token of the nucleus."""
        return kept.nucleus(self.values)


class MinP(Truncation):
    """Keeps tokens whose probability is at least p times the maximum (Nguyen et al. 2024)."""

    parameters = ("min_p",)

    def threshold(self, kept: KeptTokens) -> Tensor:
        """The logarithm of p, because the largest scaled logit is 0."""
        return kept.column(self.values).log()
