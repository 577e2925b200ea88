"""The sampling parameters of the running requests, one row per request, from which a batch selects its rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.engine.sampling.exponential_noise import noise_keys
from megatron_runtime.engine.sampling.filters import EDITS, TRUNCATIONS
from megatron_runtime.engine.sampling.filters.grammar import GrammarMask
from megatron_runtime.engine.sampling.filters.protocol import Draws, FilterRequest, LogitsEdit
from megatron_runtime.engine.sampling.filters.truncations import Truncation
from megatron_runtime.engine.sampling.grammar import RequestGuide
from megatron_runtime.engine.sampling.thinking import ThinkingLimit
from megatron_runtime.engine.scheduling.sequence import Sequence
from megatron_runtime.sampling_params import SamplingParams


@dataclass(frozen=True)
class SamplingRules:
    """The sampling parameters of the S rows of a batch."""

    temperature: NDArray[np.float32]
    """[S]; 0 is greedy."""
    keys: NDArray[np.uint64]
    """[S], as from noise_keys."""
    truncations: tuple[Truncation, ...] = ()
    """The truncations that any row uses, in the order in which they apply, with a parameter for every row."""
    edits: tuple[LogitsEdit, ...] = ()
    """The edits that any row uses, in the order in which they apply; all precede temperature and truncations."""

    @property
    def mask_milliseconds(self) -> Mapping[int, int]:
        """How long the masks of grammars took, for rows with at least one."""
        return next((edit.milliseconds for edit in self.edits if isinstance(edit, GrammarMask)), {})

    @property
    def changes_logits(self) -> bool:
        """Whether ``edit_`` changes anything."""
        return bool(self.edits)

    def edit_(self, logits: Tensor) -> None:
        """Apply the edits to the logits, [S, vocab], in place."""
        for edit in self.edits:
            edit.apply_(logits)

    @cached_property
    def most_kept(self) -> NDArray[np.int32]:
        """[S], the number of the most likely tokens that determine the truncations; 0 where it is unknown."""
        most = np.zeros(len(self.temperature), np.int32)
        for truncation in self.truncations:
            if truncation.most_kept is not None:
                np.maximum(most, truncation.most_kept, out=most)
        return most

    @property
    def is_stochastic(self) -> NDArray[np.bool_]:
        """[S], the rows that are not greedy."""
        stochastic: NDArray[np.bool_] = (self.temperature > 0) & (self.most_kept != 1)
        return stochastic

    @cached_property
    def is_truncated(self) -> NDArray[np.bool_]:
        """[S], the rows that use any truncation."""
        return self._any_active(self.truncations)

    @cached_property
    def ranks(self) -> NDArray[np.bool_]:
        """[S], the rows that use a truncation that ranks tokens."""
        return self._any_active([truncation for truncation in self.truncations if truncation.ranks])

    def take(self, rows: NDArray[np.intp]) -> SamplingRules:
        """The rules of some rows, without their edits."""
        truncations = tuple(truncation.take(rows) for truncation in self.truncations)
        return SamplingRules(self.temperature[rows], self.keys[rows], truncations)

    def _any_active(self, truncations: Sequences[Truncation]) -> NDArray[np.bool_]:
        active = np.zeros(len(self.temperature), np.bool_)
        for truncation in truncations:
            active |= truncation.active
        return active


class SamplingTable:
    """The sampling parameters of the running requests.

    Args:
        num_rows: Most running requests.
        vocab_size: Columns of the logits.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._temperature = np.zeros(num_rows, np.float32)
        self._seed = np.zeros(num_rows, np.uint64)
        self._edits = [kind(num_rows, vocab_size) for kind in EDITS]
        self._truncations = [kind(num_rows, vocab_size) for kind in TRUNCATIONS]

    def write(
        self,
        row: int,
        params: SamplingParams,
        prompt_length: int,
        stop_ids: Collection[int] = (),
        bad_sequences: Collection[tuple[int, ...]] = (),
        guide: RequestGuide | None = None,
        thinking: ThinkingLimit | None = None,
    ) -> None:
        """Assign a row to a request, and drop the previous contents of the row."""
        assert params.seed is not None, "the engine gives every request a seed"
        self._temperature[row] = min(params.temperature, float(np.finfo(np.float32).max))
        self._seed[row] = params.seed
        request = FilterRequest(params, prompt_length, stop_ids, bad_sequences, guide, thinking)
        for part in (*self._edits, *self._truncations):
            part.set_row(row, request)

    def rules(self, prefixes: Sequences[tuple[Sequence, int]], with_edits: bool = True) -> SamplingRules:
        """The rules for sampling the next tokens. Each of ``prefixes`` is a running sequence and the length of its
        prefix."""
        draws = Draws(prefixes)
        edits = (part.for_batch(draws) for part in (self._edits if with_edits else ()))
        truncations = (part.for_batch(draws) for part in self._truncations)
        return SamplingRules(
            temperature=self._temperature[draws.rows],
            keys=noise_keys(self._seed[draws.rows], draws.lengths),
            truncations=tuple(part for part in truncations if part is not None),
            edits=tuple(part for part in edits if part is not None),
        )
