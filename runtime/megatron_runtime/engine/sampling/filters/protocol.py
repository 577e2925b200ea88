"""The interface between the sampler and its filters."""

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
from megatron_runtime.engine.sampling.thinking import ThinkingLimit
from megatron_runtime.engine.scheduling.sequence import Sequence
from megatron_runtime.sampling_params import SamplingParams

Edit = TypeVar("Edit", bound="LogitsEdit", covariant=True)


@dataclass(frozen=True)
class FilterRequest:
    """The properties of a starting request that filters read."""

    params: SamplingParams
    prompt_length: int
    stop_ids: Collection[int] = ()
    """Tokens that end the answer; some may be outside the vocabulary."""
    bad_sequences: Collection[tuple[int, ...]] = ()
    """Token sequences that the answer must not contain, each of one token or more."""
    guide: RequestGuide | None = None
    """Follows the request's grammar."""
    thinking: ThinkingLimit | None = None
    """Ends the reasoning at the request's budget."""


@dataclass(frozen=True)
class Draws:
    """The S tokens that a batch samples, each for one running sequence."""

    prefixes: Sequences[tuple[Sequence, int]]
    """[S], the sequence of each token, and the number of its tokens that precede the sampled one."""

    @cached_property
    def rows(self) -> NDArray[np.intp]:
        """[S], the rows of the sequences' requests."""
        return np.array([sequence.row for sequence, _ in self.prefixes], np.intp)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[S], the number of tokens before each sampled token."""
        return np.array([length for _, length in self.prefixes], np.int64)


class LogitsFilter(Protocol):
    """The effect of sampling parameters on the logits of the running requests. Each request has a row.

    A filter is an edit or a truncation. Edits change logits and contribute a LogitsEdit to a batch. Truncations keep
    the most likely tokens and contribute a Truncation: a threshold, which the sampler can often compute from few
    tokens.

    Args:
        num_rows: Most running requests.
        vocab_size: Columns of the logits.
    """

    parameters: ClassVar[tuple[str, ...]]
    """The fields of SamplingParams that the filter reads. SamplingParams declares their types and ranges."""

    def __init__(self, num_rows: int, vocab_size: int) -> None: ...

    @property
    def is_used(self) -> bool:
        """Whether any row uses this filter, including rows without a request until they get one."""

    def set_row(self, row: int, request: FilterRequest) -> None:
        """Read a request's parameters into a row, and drop the previous contents of the row."""


class EditFilter(LogitsFilter, Protocol[Edit]):
    """A filter that is an edit."""

    def for_batch(self, draws: Draws) -> Edit | None:
        """The contribution of this filter to a batch; None if no row of the batch uses it."""


class LogitsEdit(Protocol):
    """The contribution of an edit to a batch of S rows."""

    def apply_(self, logits: Tensor) -> None:
        """Change the logits, float32 [S, vocab], in place."""
