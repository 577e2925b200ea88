"""The KV blocks of the running sequences, as tables on the host."""

from __future__ import annotations

from collections.abc import Sequence as Slices

import numpy as np
from numpy.typing import NDArray

from megatron_runtime.engine.scheduling.sequence import Sequence, SequenceSlice


class BlockTables:
    """A row of block numbers for each running sequence.

    Args:
        num_rows: Most running sequences.
        width: Blocks of the longest one.
        block_size_tokens: Tokens of a block.
    """

    def __init__(self, num_rows: int, width: int, block_size_tokens: int) -> None:
        self._blocks = np.zeros((num_rows, width), np.int32)
        self._num_known = [0] * num_rows
        self.block_size_tokens = block_size_tokens
        self._changed: dict[int, int] = {}
        """By row, the first entry that was written since `pop_changes`."""

    @property
    def width(self) -> int:
        """Blocks of the longest sequence."""
        return self._blocks.shape[1]

    def clear(self, row: int) -> None:
        """Begin a row anew."""
        self._num_known[row] = 0

    def sync(self, sequence: Sequence) -> int:
        """Copy new blocks of the sequence to its row, and return the row."""
        row = sequence.row
        assert row is not None, f"request {sequence.request_id} has no row"
        known, now = self._num_known[row], len(sequence.blocks)
        if known != now:
            self._blocks[row, known:now] = sequence.blocks[known:now]
            self._num_known[row] = now
            self._changed[row] = min(known, self._changed.get(row, known))
        return row

    def sync_all(self, slices: Slices[SequenceSlice]) -> None:
        """As `sync`, for the sequences of all slices."""
        known = self._num_known
        for part in slices:
            sequence = part.sequence
            # Few sequences of a pass have new blocks, and the others are not worth a call.
            if sequence.row is None or known[sequence.row] != len(sequence.blocks):
                self.sync(sequence)

    def pop_changes(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """What was written since the last call: places in the flat tables, and the blocks there, both [N]."""
        ranges = [(row, first, self._num_known[row]) for row, first in self._changed.items()]
        self._changed = {}
        places = [np.arange(row * self.width + first, row * self.width + end) for row, first, end in ranges]
        places_there = np.concatenate(places) if places else np.empty(0, np.int64)
        return places_there, self._blocks.reshape(-1)[places_there]

    def mark_all_changed(self) -> None:
        """Let `pop_changes` return all entries of running sequences."""
        self._changed = {row: 0 for row, known in enumerate(self._num_known) if known}

    def slots(self, rows: NDArray[np.intp], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slots of tokens, given by their rows and positions: int64 [T], as in ForwardBatch."""
        blocks = self._blocks[rows, positions // self.block_size_tokens].astype(np.int64)
        return blocks * self.block_size_tokens + positions % self.block_size_tokens

    def padded(self, rows: NDArray[np.intp], contexts: NDArray[np.int64]) -> NDArray[np.int32]:
        """The tables of some rows with contexts of these lengths, as wide as the longest needs, zeros past each."""
        used = -(-contexts // self.block_size_tokens)
        widest = int(used.max())
        tables = self._blocks[rows, :widest]
        tables[np.arange(widest) >= used[:, None]] = 0
        return tables
