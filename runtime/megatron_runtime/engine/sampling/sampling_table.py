"""The sampling parameters of the running requests, one row per request, from which a batch selects its rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.engine.sampling.exponential_noise import noise_keys
from megatron_runtime.engine.sampling.filters import EDITS, TRUNCATIONS
from megatron_runtime.engine.sampling.filters.grammar import GrammarMask
from megatron_runtime.engine.sampling.filters.protocol import Draws, FilterRequest, LogitsEdit
from megatron_runtime.engine.sampling.filters.token_edits import FrequencyAndPresencePenalty, RepetitionPenalty
from megatron_runtime.engine.sampling.filters.truncations import Truncation
from megatron_runtime.engine.sampling.grammar import RequestGuide
from megatron_runtime.engine.sampling.penalties import Penalties, PenaltyTable
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
    """The edits that any row uses, in the order in which they apply; all precede temperature and truncations. They need
    the tokens of the sequences."""
    penalties: Penalties | None = None
    """Those for which the device counts the tokens; they follow biases, and precede all other edits."""

    @property
    def mask_milliseconds(self) -> Mapping[int, int]:
        """How long the masks of grammars took, for rows with at least one."""
        return next((edit.milliseconds for edit in self.edits if isinstance(edit, GrammarMask)), {})

    @property
    def changes_logits(self) -> bool:
        """Whether edits or penalties change anything."""
        return bool(self.edits) or self.penalties is not None

    def edit_(self, logits: Tensor) -> None:
        """Apply the edits to the logits, [S, vocab], in place. There are no penalties for which a device counts."""
        assert self.penalties is None, "only GpuSampler has the tokens of a device"
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
        """The rules of some rows, without edits and penalties."""
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
        penalties: Counts the tokens of penalized requests on a device; None: the host counts them.
    """

    def __init__(self, num_rows: int, vocab_size: int, penalties: PenaltyTable | None = None) -> None:
        self._temperature = np.zeros(num_rows, np.float32)
        self._seed = np.zeros(num_rows, np.uint64)
        self._edits = [kind(num_rows, vocab_size) for kind in EDITS]
        self._truncations = [kind(num_rows, vocab_size) for kind in TRUNCATIONS]
        self._penalties = penalties
        kinds = RepetitionPenalty, FrequencyAndPresencePenalty
        self._penalties_of_host = [part for part in self._edits if isinstance(part, kinds)]

    def write(
        self,
        row: int,
        params: SamplingParams,
        prompt_length: int,
        stop_ids: Collection[int] = (),
        bad_sequences: Collection[tuple[int, ...]] = (),
        guide: RequestGuide | None = None,
        thinking: ThinkingLimit | None = None,
        *,
        counts_on_device: bool = False,
    ) -> None:
        """Assign a row to a request, and drop the previous contents of the row.

        With ``counts_on_device``, the rules are only asked for the next token of a pass, once for the sequence.
        """
        assert params.seed is not None, "the engine gives every request a seed"
        self._temperature[row] = min(params.temperature, float(np.finfo(np.float32).max))
        self._seed[row] = params.seed
        request = FilterRequest(params, prompt_length, stop_ids, bad_sequences, guide, thinking)
        for part in (*self._edits, *self._truncations):
            part.set_row(row, request)
        if self._penalties is not None:
            self._penalties.set_row(row, request if counts_on_device else None)
            if self._penalties.has(row):
                for penalty in self._penalties_of_host:
                    penalty.drop_row(row)

    @property
    def may_edit(self) -> bool:
        """Whether rules can have edits, which need tokens."""
        return any(part.is_used for part in self._edits)

    def rules(self, prefixes: Sequences[tuple[Sequence, int]], with_edits: bool = True) -> SamplingRules:
        """The rules for sampling the next tokens. Each of ``prefixes`` is a running sequence and the length of its
        prefix."""
        draws = Draws(prefixes)
        rules = self.rules_without_edits(draws.rows, draws.lengths)
        if not with_edits:
            return rules
        penalties = None
        if self._penalties is not None:
            for row, request in self._penalties.pop_outgrown(draws):
                for part in self._penalties_of_host:
                    part.set_row(row, request)
            penalties = self._penalties.for_batch(draws)
        edits = (part.for_batch(draws) for part in self._edits)
        return replace(rules, edits=tuple(part for part in edits if part is not None), penalties=penalties)

    def rules_for_sampled(
        self, rows: NDArray[np.intp], lengths: NDArray[np.int64], sources: NDArray[np.int64]
    ) -> SamplingRules | None:
        """As `rules` without edits, for sequences whose last tokens only the device knows, at ``sources`` [S] among
        those that the last pass has sampled; None if penalties need the tokens."""
        rules = self.rules_without_edits(rows, lengths)
        if self._penalties is None:
            return rules
        if not self._penalties.are_known(rows, lengths):
            return None
        return replace(rules, penalties=self._penalties.for_sampled(rows, lengths, sources))

    def rules_without_edits(self, rows: NDArray[np.intp], lengths: NDArray[np.int64]) -> SamplingRules:
        """As `rules`; the sequences are given by their rows, [S], and the prefixes by their lengths, [S]."""
        truncations = (part.for_rows(rows) for part in self._truncations)
        return SamplingRules(
            temperature=self._temperature[rows],
            keys=noise_keys(self._seed[rows], lengths),
            truncations=tuple(part for part in truncations if part is not None),
        )
