"""The grammar filter: excludes the tokens that the grammar of a request does not allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.engine.sampling.filters.protocol import Draws, EditFilter, FilterRequest
from megatron_runtime.engine.sampling.grammar import RequestGuide


@dataclass(frozen=True)
class GrammarMask:
    """The allowed tokens of G rows of a batch."""

    rows: NDArray[np.int64]
    """[G], rows of the logits."""
    allowed: NDArray[np.bool_]
    """[G, vocab]."""
    milliseconds: Mapping[int, int] = field(default_factory=dict)
    """How long the computation took, for rows with at least one."""

    def apply_(self, logits: Tensor) -> None:
        """Exclude all other tokens of these rows of the logits, [S, vocab], in place."""
        rows = torch.from_numpy(self.rows).to(logits.device)
        forbidden = torch.from_numpy(~self.allowed).to(logits.device)
        logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)


class GrammarFilter(EditFilter[GrammarMask]):
    """Keeps the tokens that the request's grammar allows next."""

    parameters = ("grammar",)

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        del num_rows
        self._vocab_size = vocab_size
        self._guides: dict[int, RequestGuide] = {}

    @property
    def is_used(self) -> bool:
        """Whether any row has a guide."""
        return bool(self._guides)

    def set_row(self, row: int, request: FilterRequest) -> None:
        """Use the request's guide, if it has one."""
        self._guides.pop(row, None)
        if request.guide is not None:
            self._guides[row] = request.guide

    def for_batch(self, draws: Draws) -> GrammarMask | None:
        """The masks of the rows with a grammar."""
        if not self.is_used:
            return None
        found: dict[int, NDArray[np.bool_]] = {}
        times: dict[int, int] = {}
        for index, (sequence, length) in enumerate(draws.prefixes):
            guide = self._guides.get(sequence.row) if sequence.row is not None else None
            if guide is not None:
                drafts = sequence.drafts_within(length)
                found[index] = guide.after(sequence.tokens, length, self._vocab_size, num_drafts=drafts)
                if guide.mask_milliseconds:
                    times[index] = guide.mask_milliseconds
        return GrammarMask(np.array([*found], np.int64), np.stack([*found.values()]), times) if found else None
