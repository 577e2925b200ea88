"""What the sampler asks of a filter."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.engine.sampling.grammar import RequestGuide
from megatron_runtime.engine.scheduling.sequence import Sequence
from megatron_runtime.sampling_params import SamplingParams

BatchPart = TypeVar("BatchPart", covariant=True)


@dataclass(frozen=True)
class FilterRequest:
    """What filters may read of a request that starts to run."""

    params: SamplingParams
    prompt_length: int
    stop_ids: Collection[int] = ()
    """Tokens that end the answer; some may be outside the vocabulary."""
    bad_sequences: Collection[tuple[int, ...]] = ()
    """Token sequences that the answer must not contain, each of one token or more."""
    guide: RequestGuide | None = None
    """Follows the request's grammar."""


@dataclass(frozen=True)
class Draws:
    """The S tokens that a batch samples."""

    prefixes: Sequences[tuple[Sequence, int]]
    """[S], each token follows a running sequence's first so many tokens."""

    @cached_property
    def rows(self) -> NDArray[np.intp]:
        """[S], the rows of the sequences' requests."""
        return np.array([sequence.row for sequence, _ in self.prefixes], np.intp)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[S], the lengths of the prefixes."""
        return np.array([length for _, length in self.prefixes], np.int64)


class LogitsFilter(Protocol[BatchPart]):
    """The effect of sampling parameters on the logits of the running requests, of which each has a row.

    There are two kinds, which differ in what they contribute to a batch. Edits change logits: their part is a
    LogitsEdit. Truncations keep the most likely tokens: their part is a Truncation, a threshold that the sampler can
    often compute from few tokens.

    Args:
        num_rows: Most running requests.
        vocab_size: Columns of the logits.
    """

    parameters: ClassVar[tuple[str, ...]]
    """The fields of SamplingParams that it reads. Their types and ranges are declared there."""

    def __init__(self, num_rows: int, vocab_size: int) -> None: ...

    def set_row(self, row: int, request: FilterRequest) -> None:
        """Read a request's parameters into a row; what the row held before is dropped."""

    def for_batch(self, draws: Draws) -> BatchPart | None:
        """The filter's part in a batch; None if no row of the batch uses it."""


class LogitsEdit(Protocol):
    """The part of one filter in a batch of S rows."""

    def apply_(self, logits: Tensor) -> None:
        """Change the logits, float32 [S, vocab], in place."""
