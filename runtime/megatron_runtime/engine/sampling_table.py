"""How every running request samples, one row each, so that a batch's rules are one indexing away."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Sequences
from typing import TYPE_CHECKING

import numpy as np

from megatron_runtime.engine.guide_mask import GuideMask
from megatron_runtime.engine.logit_edits import LogitEdits, RequestEdits, merged
from megatron_runtime.engine.noise import noise_keys
from megatron_runtime.engine.sampling_rules import SamplingRules
from megatron_runtime.engine.sequence import Sequence
from megatron_runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from megatron_runtime.engine.request_guide import RequestGuide


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
        """Give a row to a request, in place of whoever had it."""
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
        """How tokens are drawn after the first so many tokens of running sequences."""
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
