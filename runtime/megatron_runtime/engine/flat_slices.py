"""The tokens of slices in one row, with what describes them."""

from __future__ import annotations

from collections.abc import Sequence as Slices
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_runtime.engine.block_tables import BlockTables
from megatron_runtime.engine.scheduling.sequence import SequenceSlice


@dataclass(frozen=True)
class FlatSlices:
    """R slices of running sequences, with T tokens together."""

    rows: NDArray[np.intp]
    """[R], the rows of the sequences in the block tables."""
    contexts: NDArray[np.int64]
    """[R], tokens in the cache after the pass."""
    query_starts: NDArray[np.int64]
    """[R + 1], prefix sums of the tokens of each slice."""
    tokens: NDArray[np.int64]
    """[T]."""
    positions: NDArray[np.int64]
    """[T], the places of the tokens in their sequences."""
    slots: NDArray[np.int64]
    """[T], as in ForwardBatch."""

    @classmethod
    def of(cls, slices: Slices[SequenceSlice], tables: BlockTables) -> FlatSlices:
        """Those of the slices, whose new blocks are written to the tables."""
        count = len(slices)
        tokens: list[int] = []
        rows = np.empty(count, np.intp)
        starts = np.empty(count, np.int64)
        query_starts = np.zeros(count + 1, np.int64)
        for index, part in enumerate(slices):
            sequence = part.sequence
            rows[index] = tables.sync(sequence)
            starts[index] = part.start
            if part.length == 1:
                tokens.append(sequence.tokens[part.start])
            else:
                tokens += sequence.tokens[part.start : part.end]
            query_starts[index + 1] = len(tokens)
        lengths = np.diff(query_starts)
        positions = np.arange(len(tokens)) + np.repeat(starts - query_starts[:-1], lengths)
        slots = tables.slots(np.repeat(rows, lengths), positions)
        return cls(rows, starts + lengths, query_starts, np.array(tokens, np.int64), positions, slots)
