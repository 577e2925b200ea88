"""The running sequences of a pass, as arrays."""

from __future__ import annotations

from collections.abc import Sequence as Slices
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_runtime.engine.scheduling.sequence import SequenceSlice


class SequenceRows(NamedTuple):
    """N running sequences."""

    rows: NDArray[np.intp]
    """[N], those of the sequences in the context's tables."""
    lengths: NDArray[np.int64]
    """[N], the numbers of their computed tokens."""

    @classmethod
    def of(cls, slices: Slices[SequenceSlice]) -> SequenceRows:
        """The sequences of slices, after the pass that computes these."""
        rows = np.array([part.sequence.row for part in slices], np.intp)
        return cls(rows, np.array([part.end for part in slices], np.int64))

    def following(self, places: NDArray[np.intp] | slice) -> SequenceRows:
        """Some of them, with one more token each."""
        return SequenceRows(self.rows[places], self.lengths[places] + 1)


class SampledTokens(NamedTuple):
    """The last tokens of N running sequences, which are on the device alone."""

    sources: NDArray[np.int64]
    """[N], their places among the tokens that the last pass has sampled."""
    sequences: SequenceRows
    """After the pass that computes these tokens."""
