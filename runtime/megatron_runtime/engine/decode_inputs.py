"""The inputs of a decode pass as arrays of a fixed size, of which each pass fills the first rows."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Slices
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatron_runtime.engine.block_tables import BlockTables
from megatron_runtime.engine.sampling.gpu_sampler import TRUNCATION_FIELDS, row_parameters
from megatron_runtime.engine.sampling.sampling_table import SamplingRules
from megatron_runtime.engine.scheduling.sequence import SequenceSlice
from megatron_runtime.model.kernel_warm_up import NOT_STORED

Fields = dict[str, tuple[DTypeLike, int]]
"""Types and sizes of arrays by their names."""

_ROW_FIELDS: dict[str, DTypeLike] = {
    **{"tokens": np.int64, "positions": np.int64, "slots": np.int64},
    **{"context_lengths": np.int32, "table_rows": np.int32},
    **{"temperature": np.float32, "low": np.int32, "high": np.int32},
    **{name: kind.dtype for kind, name in TRUNCATION_FIELDS.items()},
}
"""By the names of ForwardBatch, SampledRows and Truncations; ``table_rows`` are rows of the block tables."""
_PADDING = {"slots": NOT_STORED, "context_lengths": 1}
"""Inputs of a row of padding that are not 0, beside its row of the block tables."""


def is_decode_pass(slices: Slices[SequenceSlice]) -> bool:
    """Whether each slice has one token, and samples the next one."""
    return all(part.samples and part.end - part.start == 1 and part.sequence.pooling is None for part in slices)


class DecodeInputs:
    """Writes the inputs of passes.

    Args:
        tables: The block tables. On the device they have one more row, of zeros, which rows of padding use.
        num_table_rows: Their rows.
        num_rows: Most rows of a pass, and most new entries of the tables that come with it.
    """

    def __init__(self, tables: BlockTables, num_table_rows: int, num_rows: int) -> None:
        self._tables = tables
        self._padding_row = num_table_rows
        self._num_rows = num_rows

    @property
    def fields(self) -> Fields:
        """The arrays. ``new_places`` and ``new_blocks`` are the new entries of the flat tables."""
        entries: Fields = {"new_places": (np.int64, self._num_rows), "new_blocks": (np.int32, self._num_rows)}
        return entries | {name: (dtype, self._num_rows) for name, dtype in _ROW_FIELDS.items()}

    def write_nothing(self, here: Mapping[str, NDArray[Any]]) -> None:
        """A pass that consists of padding."""
        self._pad(here, 0)
        self._write_entries(here, np.empty(0, np.int64), np.empty(0, np.int32))

    def write(
        self, here: Mapping[str, NDArray[Any]], slices: Slices[SequenceSlice], rules: SamplingRules
    ) -> dict[str, NDArray[Any]]:
        """A pass over slices of one token each. The rows after them are padding, whose keys and values are not stored.

        Returns:
            ``places`` and ``blocks`` of the new entries of the tables for which there was no room; empty if none.
        """
        count, tables = len(slices), self._tables
        rows = np.fromiter((tables.sync(part.sequence) for part in slices), np.intp, count)
        positions = np.fromiter((part.start for part in slices), np.int64, count)
        values = {
            "tokens": np.fromiter((part.sequence.tokens[part.start] for part in slices), np.int64, count),
            "positions": positions,
            "slots": tables.slots(rows, positions),
            "context_lengths": positions + 1,
            "table_rows": rows,
            **row_parameters(rules),
        }
        for name in _ROW_FIELDS:
            here[name][:count] = values.get(name, 0)
        self._pad(here, count)
        places, blocks = tables.pop_changes()
        self._write_entries(here, places[: self._num_rows], blocks[: self._num_rows])
        if len(places) <= self._num_rows:
            return {}
        return {"places": places[self._num_rows :], "blocks": blocks[self._num_rows :]}

    def _pad(self, here: Mapping[str, NDArray[Any]], count: int) -> None:
        for name in _ROW_FIELDS:
            here[name][count:] = _PADDING.get(name, 0)
        here["table_rows"][count:] = self._padding_row

    def _write_entries(
        self, here: Mapping[str, NDArray[Any]], places: NDArray[np.int64], blocks: NDArray[np.int32]
    ) -> None:
        """The entries beyond them write zeros to the row of padding."""
        here["new_places"][len(places) :] = self._padding_row * self._tables.width
        here["new_blocks"][len(blocks) :] = 0
        here["new_places"][: len(places)] = places
        here["new_blocks"][: len(blocks)] = blocks
