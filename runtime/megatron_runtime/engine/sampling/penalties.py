"""Repetition, frequency and presence penalties on a GPU, which counts the tokens of the running sequences itself.

The GPU has a list of the distinct tokens of each sequence with their counts. Each pass adds the token that it begins
with, which the host need not know. The host sends a whole list only where the GPU has none of this sequence, or one of
another length: after the prompt, after an eviction, or if a pass is repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.engine.sampling.filters.protocol import Draws, FilterRequest
from megatron_runtime.engine.scheduling.sequence import Sequence

CAPACITY = 8192
"""Most distinct tokens of a sequence that a GPU counts."""
_ROOM = 512
"""Tokens for which a list has room until its sequence is examined again."""
_ALIGNMENT = 16
"""Capacities are multiples of it, for which Triton compiles a kernel once."""
_NONE = -1
"""No token, no place, or a list that is not known."""


@dataclass(frozen=True)
class Penalties:
    """The penalties of the S rows of a batch."""

    table: PenaltyTable
    rows: NDArray[np.intp]
    """[S], the lists of the sequences; negative: no penalty."""
    lengths: NDArray[np.int64]
    """[S], the numbers of tokens of the sequences."""
    factors: NDArray[np.float64]
    """[3, S]: repetition, frequency and presence."""
    tokens: NDArray[np.int64] | None
    """[S], the last tokens of the sequences; negative: it is counted. None: only the device knows them."""
    sources: NDArray[np.int64] | None
    """[S], the places of these tokens among those that the last pass has sampled; None: the host knows them."""
    lists: Mapping[int, tuple[NDArray[np.int32], NDArray[np.int32]]]
    """Distinct tokens and their counts, of the sequences of some rows of the batch, whose lists are to be sent."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What `apply_` needs on the device."""
        numbers = np.full((4, len(self.rows)), _NONE, np.int32)
        numbers[0] = self.rows
        if self.sources is not None:
            numbers[2] = self.sources
        if self.tokens is not None:
            numbers[3] = self.tokens
        arrays: dict[str, NDArray[Any]] = {"list numbers": numbers, "factors": self.factors}
        if not self.lists:
            return arrays
        for index, (tokens, _) in self.lists.items():
            numbers[1, index] = len(tokens)
        starts = self.rows * self.table.capacity
        places = [np.arange(len(tokens)) + starts[index] for index, (tokens, _) in self.lists.items()]
        if any(map(len, places)):
            arrays["list places"] = np.concatenate(places)
            arrays["list entries"] = np.concatenate([np.stack(each, axis=1) for each in self.lists.values()])
        return arrays

    def apply_(self, logits: Tensor, there: Mapping[str, Tensor], sampled: Tensor | None) -> None:
        """Count the last tokens, and change the logits in place.

        Args:
            logits: float32 [S, vocab].
            there: ``arrays`` on their device.
            sampled: int64, the tokens of the last pass; None if the host knows them.
        """
        # Imported here, because Triton is not needed on other devices.
        from megatron_runtime.gpu import penalties

        lists = self.table.counts
        if "list places" in there:
            lists.write(there["list places"], there["list entries"])
        penalties.penalize(logits, sampled, there["list numbers"], there["factors"], lists)
        self.note_applied()

    def note_applied(self) -> None:
        """The lists have the tokens of these sequences."""
        used = self.rows >= 0
        self.table.counted[self.rows[used]] = self.lengths[used]


class PenaltyTable:
    """The penalties of the running requests, and what their lists on the device contain.

    Args:
        num_rows: Most running requests.
        longest: Most tokens of a sequence.
        device: That of the logits.
    """

    def __init__(self, num_rows: int, longest: int, device: torch.device) -> None:
        from megatron_runtime.gpu.penalties import TokenCounts

        self.capacity = _capacity_for(longest)
        self.counts = TokenCounts(num_rows, self.capacity, device)
        self.counted = np.full(num_rows, _NONE, np.int64)
        """[rows], the number of tokens of the sequence for which the list on the device is right."""
        self._requests: dict[int, FilterRequest] = {}
        self._is_used = np.zeros(num_rows, np.bool_)
        self._fits_until = np.zeros(num_rows, np.int64)
        """[rows], the number of tokens of the sequence up to which its list is known to have room."""
        self._factors = np.zeros((3, num_rows), np.float64)

    def set_row(self, row: int, request: FilterRequest | None) -> None:
        """Read a request's penalties into a row; None: the device does not count its tokens."""
        self._requests.pop(row, None)
        self._is_used[row] = False
        if request is None:
            return
        params = request.params
        if params.repetition_penalty == 1 and not params.frequency_penalty and not params.presence_penalty:
            return
        self._requests[row] = request
        self._is_used[row] = True
        self._factors[:, row] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self.counted[row] = _NONE
        self._fits_until[row] = _first_listed(request) + self.capacity

    def has(self, row: int) -> bool:
        """Whether the device counts the tokens of a row."""
        return row in self._requests

    def pop_outgrown(self, draws: Draws) -> Iterable[tuple[int, FilterRequest]]:
        """Drop the rows whose lists might have no room for the last tokens.

        What is dropped depends on the tokens alone, so that all ranks that sample drop the same rows.
        """
        if not self._requests:
            return []
        rows, found = draws.rows, []
        for index in np.flatnonzero(self._is_used[rows] & (draws.lengths > self._fits_until[rows])).tolist():
            sequence, length = draws.prefixes[index]
            row, request = int(rows[index]), self._requests[int(rows[index])]
            while self._is_used[row] and self._fits_until[row] < length:
                known = int(self._fits_until[row])
                if len(set(sequence.tokens[_first_listed(request) : known])) > self.capacity - _ROOM:
                    self.set_row(row, None)
                    found.append((row, request))
                self._fits_until[row] = known + _ROOM
        return found

    def for_batch(self, draws: Draws) -> Penalties | None:
        """The penalties of a batch, without its rows that `pop_outgrown` drops; None if it has none."""
        rows, lengths = draws.rows, draws.lengths
        if not self._requests or not (used := self._is_used[rows]).any():
            return None
        news = lengths - self.counted[rows]
        last = np.fromiter((sequence.tokens[length - 1] for sequence, length in draws.prefixes), np.int64, len(rows))
        lists = {}
        for index in np.flatnonzero(used & (news != 0) & (news != 1)).tolist():
            sequence, length = draws.prefixes[index]
            lists[index] = _listed(sequence, length, self._requests[int(rows[index])])
        return Penalties(
            table=self,
            rows=np.where(used, rows, _NONE),
            lengths=lengths,
            factors=self._factors.take(rows, axis=1),
            tokens=np.where(news == 1, last, _NONE),
            sources=None,
            lists=lists,
        )

    def are_known(self, rows: NDArray[np.intp], lengths: NDArray[np.int64]) -> bool:
        """Whether lists of this many tokens, whose last ones the host does not know, need none from the host."""
        return not self._requests or not (self._is_used[rows] & (lengths > self._fits_until[rows])).any()

    def for_sampled(
        self, rows: NDArray[np.intp], lengths: NDArray[np.int64], sources: NDArray[np.int64]
    ) -> Penalties | None:
        """The same for sequences whose last tokens only the device knows; `are_known` is true for them."""
        if not self._requests or not (used := self._is_used[rows]).any():
            return None
        are_next = self.counted[rows] == lengths - 1
        assert are_next[used].all(), "the last pass has counted the other tokens"
        return Penalties(
            table=self,
            rows=np.where(used, rows, _NONE),
            lengths=lengths,
            factors=self._factors.take(rows, axis=1),
            tokens=None,
            sources=sources,
            lists={},
        )


def are_equal(one: Penalties | None, rows: NDArray[np.intp], other: Penalties | None) -> bool:
    """Whether some rows of one batch have the penalties of all rows of another one, of the same sequences."""
    if one is None:
        return other is None
    mine = one.rows[rows]
    return bool((mine < 0).all()) if other is None else np.array_equal(mine, other.rows)


def has_one_draw(sequence: Sequence, logprobs_mode: str) -> bool:
    """Whether rules are only asked for the next token of a sequence: not for drafts, nor for the log probabilities of
    sampled distributions."""
    return sequence.draft_length is None and (sequence.next_log_prob is None or logprobs_mode == "raw_logprobs")


def penalty_bytes(num_rows: int, longest: int) -> int:
    """Bytes of the lists of a PenaltyTable."""
    return 8 * num_rows * _capacity_for(longest)


def _capacity_for(longest: int) -> int:
    return min(-(-longest // _ALIGNMENT) * _ALIGNMENT, CAPACITY)


def _first_listed(request: FilterRequest) -> int:
    """The place of the first token that has an effect."""
    return 0 if request.params.repetition_penalty != 1 else request.prompt_length


def _listed(sequence: Sequence, length: int, request: FilterRequest) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Distinct tokens, and how often the answer has each of them."""
    first = _first_listed(request)
    distinct, places = np.unique(np.array(sequence.tokens[first:length], np.int32), return_inverse=True)
    counts = np.bincount(places[request.prompt_length - first :], minlength=len(distinct))
    return distinct, counts.astype(np.int32)
