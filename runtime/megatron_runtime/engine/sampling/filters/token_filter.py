"""The common parts of filters that change the logits of single tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.engine.sampling.filters.protocol import Draws, EditFilter, FilterRequest

_FIRST_CAPACITY = 64
_MANY = 1024
"""Tokens from which on excluding them row by row is faster."""
TokenValues = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Distinct tokens [n], and a value [n] for each."""
NO_VALUES: TokenValues = np.empty(0, np.int64), np.empty(0, np.float32)


class RequestEdit(Protocol):
    """The tokens of one request whose logits a filter changes, with a value for each."""

    def after(self, tokens: Sequence[int], length: int, num_drafts: int = 0) -> TokenValues:
        """The tokens and values for the token after the first ``length`` tokens, the last of which may be drafts.
        Later calls leave the arrays unchanged."""


class Operation(Enum):
    """What a filter does with a logit and its value."""

    ADD = auto()
    PENALIZE = auto()
    """Divide positive logits by the value, and multiply others by it."""
    SUBTRACT = auto()
    EXCLUDE = auto()
    """Minus infinity; the value is infinite."""

    def apply(self, logits: Tensor, values: Tensor) -> Tensor:
        """The changed logits [N], from logits and values [N]."""
        if self is Operation.ADD:
            return logits + values
        if self is Operation.PENALIZE:
            return torch.where(logits > 0, logits / values, logits * values)
        return logits - values


class TokenFilter(EditFilter["TokenEdits"], ABC):
    """A filter that changes the logits of single tokens, given a value for each of them."""

    parameters: ClassVar[tuple[str, ...]]
    operation: ClassVar[Operation]

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        del num_rows
        self.vocab_size = vocab_size
        self._requests: dict[int, RequestEdit] = {}

    @abstractmethod
    def start(self, request: FilterRequest) -> RequestEdit | None:
        """The edit of a request; None if it does not use the filter."""

    @property
    def is_used(self) -> bool:
        """Whether any row has an edit."""
        return bool(self._requests)

    def set_row(self, row: int, request: FilterRequest) -> None:
        """Start the edit of a request, if it uses the filter."""
        self.drop_row(row)
        edit = self.start(request)
        if edit is not None:
            self._requests[row] = edit

    def drop_row(self, row: int) -> None:
        """End the edit of a row, if it has one."""
        self._requests.pop(row, None)

    def for_batch(self, draws: Draws) -> TokenEdits | None:
        """The edits of all rows in one object."""
        if not self.is_used:
            return None
        found: list[tuple[int, TokenValues]] = []
        for index, (sequence, length) in enumerate(draws.prefixes):
            edit = self._requests.get(sequence.row) if sequence.row is not None else None
            if edit is not None:
                found.append((index, edit.after(sequence.tokens, length, sequence.drafts_within(length))))
        found = [(index, edit) for index, edit in found if len(edit[0])]
        return TokenEdits(found, self.vocab_size, type(self)) if found else None


@dataclass(frozen=True)
class TokenEdits:
    """The edits of one filter in a batch: N distinct logits."""

    rows: list[tuple[int, TokenValues]]
    """By row, in their order. Rows may share their arrays."""
    vocab_size: int
    kind: type[TokenFilter]

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """[N], indices into the S * vocab logits: row * vocab + token."""
        return np.concatenate([tokens + row * self.vocab_size for row, (tokens, _) in self.rows])

    @cached_property
    def values(self) -> NDArray[np.float32]:
        """[N], the values for the filter's operation."""
        return np.concatenate([values for _, (_, values) in self.rows])

    def apply_(self, logits: Tensor) -> None:
        """Change the logits, [S, vocab] and contiguous, in place."""
        if self.kind.operation is Operation.EXCLUDE and len(self.rows[0][1][0]) >= _MANY:
            # All tokens but a few, as for many choices, whose copies would be several times the size of the logits.
            for row, (tokens, _) in self.rows:
                logits[row].index_fill_(0, torch.from_numpy(tokens).to(logits.device), -torch.inf)
            return
        flat, places = logits.view(-1), torch.from_numpy(self.places).to(logits.device)
        values = torch.from_numpy(self.values).to(logits)
        changed = self.kind.operation.apply(flat.index_select(0, places), values)
        flat.index_copy_(0, places, changed)


class FixedEdit:
    """Values that do not depend on the sequence.

    Args:
        values: Tokens and values; they are not changed.
        until: The sequence length from which on the values no longer apply; None means no limit.
    """

    def __init__(self, values: TokenValues, *, until: int | None = None) -> None:
        self._until = until
        self._values = values

    def after(self, tokens: Sequence[int], length: int, num_drafts: int = 0) -> TokenValues:
        """As in RequestEdit."""
        del tokens, num_drafts
        return self._values if self._until is None or length < self._until else NO_VALUES


class GrowingEdit(ABC):
    """Values that depend on the sequence's tokens. The cost of an update depends on the new tokens only."""

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._length = 0
        self._slots: dict[int, int] = {}
        self._tokens = np.empty(_FIRST_CAPACITY, np.int64)
        self._values = np.empty(_FIRST_CAPACITY, np.float32)

    @abstractmethod
    def changes(self, tokens: Sequence[int], start: int, end: int, *, are_drafts: bool = False) -> dict[int, float]:
        """The new values for the tokens from ``start`` to ``end``, by token. Drafts are not counted."""

    def after(self, tokens: Sequence[int], length: int, num_drafts: int = 0) -> TokenValues:
        """As in RequestEdit."""
        known = length - num_drafts
        if known < self._length:
            self._restart()  # The pass failed, and is repeated.
        for token, value in self.changes(tokens, self._length, known).items():
            self._put(token, value)
        self._length = known
        size = len(self._slots)
        found = self._tokens[:size], self._values[:size].copy()  # Tokens are only appended, so they need no copy.
        return self._with_drafts(*found, self.changes(tokens, known, length, are_drafts=True)) if num_drafts else found

    def _with_drafts(
        self, tokens: NDArray[np.int64], values: NDArray[np.float32], changes: Mapping[int, float]
    ) -> TokenValues:
        added = {token: value for token, value in changes.items() if token not in self._slots}
        for token in changes.keys() - added.keys():
            values[self._slots[token]] = changes[token]
        more = np.array([*added], np.int64), np.array([*added.values()], np.float32)
        return np.concatenate((tokens, more[0])), np.concatenate((values, more[1]))

    def _put(self, token: int, value: float) -> None:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot == len(self._tokens):
                self._tokens = np.concatenate((self._tokens, np.empty_like(self._tokens)))
                self._values = np.concatenate((self._values, np.empty_like(self._values)))
            self._tokens[slot] = token
        self._values[slot] = value
