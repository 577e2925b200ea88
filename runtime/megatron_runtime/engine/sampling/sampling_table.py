"""The sampling parameters of the running requests, one row each, from which a batch selects its rows."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.engine.sampling.exponential_noise import noise_keys
from megatron_runtime.engine.sampling.grammar import GuideMask, RequestGuide
from megatron_runtime.engine.sampling.logit_edits import LogitEdits, RequestEdits, merged
from megatron_runtime.engine.scheduling.sequence import Sequence
from megatron_runtime.sampling_params import SamplingParams


@dataclass(frozen=True)
class SamplingRules:
    """The sampling parameters of the S rows of a batch."""

    temperature: NDArray[np.float32]
    """[S]; 0 is greedy."""
    top_k: NDArray[np.int32]
    """[S]; 0 means all."""
    top_p: NDArray[np.float32]
    """[S]; 0 and 1 mean all."""
    min_p: NDArray[np.float32]
    """[S]; 0 means all."""
    keys: NDArray[np.uint64]
    """[S], as from noise_keys."""
    edits: LogitEdits | None = None
    """Changes of single logits, which come first."""
    mask: GuideMask | None = None
    """The tokens that grammars allow."""

    @property
    def changes_logits(self) -> bool:
        """Whether ``edit_`` changes anything."""
        return self.edits is not None or self.mask is not None

    def edit_(self, logits: Tensor) -> None:
        """Do edits and mask in the logits, [S, vocab], in place."""
        if self.edits is not None:
            self.edits.apply_(logits)
        if self.mask is not None:
            self.mask.apply_(logits)

    @property
    def is_stochastic(self) -> NDArray[np.bool_]:
        """[S], the rows that are not greedy."""
        stochastic: NDArray[np.bool_] = (self.temperature > 0) & (self.top_k != 1)
        return stochastic

    @property
    def has_nucleus(self) -> NDArray[np.bool_]:
        """[S], the rows that top-p truncates."""
        nucleus: NDArray[np.bool_] = (self.top_p > 0) & (self.top_p < 1)
        return nucleus

    @property
    def is_limited(self) -> NDArray[np.bool_]:
        """[S], the rows that any filter truncates."""
        limited: NDArray[np.bool_] = (self.top_k > 0) | self.has_nucleus | (self.min_p > 0)
        return limited

    @property
    def needs_ranking(self) -> NDArray[np.bool_]:
        """[S], the rows whose filters depend on the order of the tokens; the threshold of min-p does not."""
        needed: NDArray[np.bool_] = (self.top_k > 0) | self.has_nucleus
        return needed

    def take(self, rows: NDArray[np.intp]) -> SamplingRules:
        """The parameters of some rows, without their edits."""
        return SamplingRules(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.keys[rows]
        )


class SamplingTable:
    """The sampling parameters of the running requests.

    Args:
        num_rows: Most running requests.
        vocab_size: Columns of the logits.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._temperature = np.zeros(num_rows, np.float32)
        self._top_k = np.zeros(num_rows, np.int32)
        self._top_p = np.zeros(num_rows, np.float32)
        self._min_p = np.zeros(num_rows, np.float32)
        self._seed = np.zeros(num_rows, np.uint64)
        self._edits: dict[int, RequestEdits] = {}
        self._guides: dict[int, RequestGuide] = {}

    def write(
        self,
        row: int,
        params: SamplingParams,
        prompt_length: int,
        stop_ids: Collection[int],
        guide: RequestGuide | None = None,
    ) -> None:
        """Give a row to a request; what the row held before is dropped."""
        assert params.seed is not None, "the engine gives every request a seed"
        self._temperature[row] = params.temperature
        self._top_k[row] = min(params.top_k, np.iinfo(np.int32).max)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed[row] = params.seed
        self._edits.pop(row, None)
        if params.edits_logits:
            self._edits[row] = RequestEdits(params, prompt_length, stop_ids, self._vocab_size)
        self._guides.pop(row, None)
        if guide is not None:
            self._guides[row] = guide

    def rules(self, draws: Sequences[tuple[Sequence, int]]) -> SamplingRules:
        """The parameters of the next tokens after prefixes of running sequences, given by their lengths."""
        rows = np.array([sequence.row for sequence, _ in draws], np.intp)
        lengths = np.array([length for _, length in draws], np.int64)
        return SamplingRules(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            keys=noise_keys(self._seed[rows], lengths),
            edits=self._edits_of(draws) if self._edits else None,
            mask=self._mask_of(draws) if self._guides else None,
        )

    def _edits_of(self, draws: Sequences[tuple[Sequence, int]]) -> LogitEdits | None:
        found = []
        for index, (sequence, length) in enumerate(draws):
            edits = self._edits.get(sequence.row) if sequence.row is not None else None
            if edits is not None:
                found.append((index, *edits.after(sequence.tokens, length)))
        return merged(found)

    def _mask_of(self, draws: Sequences[tuple[Sequence, int]]) -> GuideMask | None:
        found = []
        for index, (sequence, length) in enumerate(draws):
            guide = self._guides.get(sequence.row) if sequence.row is not None else None
            if guide is not None:
                found.append((index, guide.after(sequence.tokens, length, self._vocab_size)))
        if not found:
            return None
        return GuideMask(np.array([index for index, _ in found], np.int64), np.stack([mask for _, mask in found]))
