"""The inputs of passes on CUDA graphs as arrays of a fixed size, of which each pass fills the first places."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Slices
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatron_runtime.engine.block_tables import BlockTables
from megatron_runtime.engine.flat_slices import FlatSlices
from megatron_runtime.engine.graph_sizes import GraphSize
from megatron_runtime.engine.sampling.gpu_sampler import TRUNCATION_FIELDS, row_parameters
from megatron_runtime.engine.sampling.sampling_table import SamplingRules
from megatron_runtime.engine.scheduling.sequence import SequenceSlice
from megatron_runtime.engine.sequence_rows import SampledTokens, SequenceRows
from megatron_runtime.model.kernel_warm_up import NOT_STORED

Fields = dict[str, tuple[DTypeLike, int]]
"""Types and sizes of arrays by their names."""

_TOKEN_FIELDS: dict[str, DTypeLike] = dict.fromkeys(("tokens", "sources", "positions", "slots"), np.int64)
"""By the names of ForwardBatch; ``sources`` are places of tokens among those that the last pass has sampled;
negative ones are of tokens that the host knows."""
_PADDING = {"sources": -1, "slots": NOT_STORED}
"""The values of padding that are not 0."""
_REQUEST_FIELDS: dict[str, DTypeLike] = {"context_lengths": np.int32, "table_rows": np.int32}
"""``table_rows`` are rows of the block tables."""
_SAMPLING_FIELDS: dict[str, DTypeLike] = {
    **{"temperature": np.float32, "low": np.int32, "high": np.int32},
    **{name: kind.dtype for kind, name in TRUNCATION_FIELDS.items()},
}
"""By the names of SampledRows and Truncations, for the requests that sample."""


def is_decode_pass(slices: Slices[SequenceSlice]) -> bool:
    """Whether each slice has one token, and samples the next one."""
    for part in slices:  # faster than a generator
        if not part.samples or part.end - part.start != 1 or part.sequence.pooling is not None:
            return False
    return True


def needs_last_logits(slices: Slices[SequenceSlice]) -> bool:
    """Whether the results of a pass are the tokens after the slices that sample: neither log probabilities of prompts,
    nor hidden states."""
    return all(part.num_log_probs <= part.samples and part.sequence.pooling is None for part in slices)


class GraphInputs:
    """Writes the inputs of passes.

    Args:
        tables: The block tables. On the device they have one more row, of zeros, which requests of padding use.
        num_table_rows: Their rows.
        largest: Most tokens and most requests of a pass.
    """

    def __init__(self, tables: BlockTables, num_table_rows: int, largest: GraphSize) -> None:
        self._tables = tables
        self._padding_row = num_table_rows
        self._largest = largest
        # As many as new tokens can need, unless a prompt begins with blocks that the prefix cache had.
        self._num_entries = largest.requests + (largest.tokens // tables.block_size_tokens) * largest.has_prompts

    @property
    def fields(self) -> Fields:
        """The arrays. ``new_places`` and ``new_blocks`` are the new entries of the flat tables; only passes with
        prompts have ``query_starts`` and ``logit_rows``."""
        tokens, requests = self._largest
        fields: Fields = {"new_places": (np.int64, self._num_entries), "new_blocks": (np.int32, self._num_entries)}
        fields |= {name: (dtype, tokens) for name, dtype in _TOKEN_FIELDS.items()}
        fields |= {name: (dtype, requests) for name, dtype in (_REQUEST_FIELDS | _SAMPLING_FIELDS).items()}
        if self._largest.has_prompts:
            fields |= {"query_starts": (np.int32, requests + 1), "logit_rows": (np.int64, requests)}
        return fields

    def write_nothing(self, here: Mapping[str, NDArray[Any]]) -> None:
        """A pass that consists of padding."""
        self._write_tokens(here, {})
        self._write_requests(here, {})
        self._write_rules(here, {})
        for name in self.fields.keys() & {"query_starts", "logit_rows"}:
            here[name][:] = 0
        self._write_entries(here, np.empty(0, np.int64), np.empty(0, np.int32))

    def write(
        self,
        here: Mapping[str, NDArray[Any]],
        slices: Slices[SequenceSlice],
        size: GraphSize,
        rules: SamplingRules,
        sampled: SampledTokens | None = None,
    ) -> dict[str, NDArray[Any]]:
        """A pass over slices on a graph of this size, without prompts if each slice has one token and samples.

        In a pass without prompts, the tokens can be ``sampled`` ones, one for each slice.

        What is beyond them is padding: tokens whose keys and values are not stored, and requests without tokens, or in
        a pass without prompts with one of them.

        Returns:
            ``places`` and ``blocks`` of the new entries of the tables for which there was no room; empty if none.
        """
        if size.has_prompts:
            self._write_prompts(here, slices)
        else:
            self._write_single_tokens(here, slices, sampled)
        self._write_rules(here, row_parameters(rules))
        places, blocks = self._tables.pop_changes()
        room = self._num_entries
        self._write_entries(here, places[:room], blocks[:room])
        return {} if len(places) <= room else {"places": places[room:], "blocks": blocks[room:]}

    def _write_single_tokens(
        self, here: Mapping[str, NDArray[Any]], slices: Slices[SequenceSlice], sampled: SampledTokens | None
    ) -> None:
        self._tables.sync_all(slices)
        if sampled is None:
            tokens = np.fromiter((part.sequence.tokens[part.start] for part in slices), np.int64, len(slices))
            given, (rows, lengths) = {"tokens": tokens}, SequenceRows.of(slices)
        else:
            given, (rows, lengths) = {"sources": sampled.sources}, sampled.sequences
        positions = lengths - 1
        self._write_tokens(here, given | {"positions": positions, "slots": self._tables.slots(rows, positions)})
        self._write_requests(here, {"context_lengths": lengths, "table_rows": rows})

    def _write_prompts(self, here: Mapping[str, NDArray[Any]], slices: Slices[SequenceSlice]) -> None:
        """The logits are those of the slices that sample, in their order."""
        flat, count = FlatSlices.of(slices, self._tables), len(slices)
        self._write_tokens(here, {"tokens": flat.tokens, "positions": flat.positions, "slots": flat.slots})
        self._write_requests(here, {"context_lengths": flat.contexts, "table_rows": flat.rows})
        here["query_starts"][: count + 1] = flat.query_starts
        here["query_starts"][count + 1 :] = flat.query_starts[-1]
        samples = np.fromiter((part.samples for part in slices), bool, count)
        _fill(here["logit_rows"], flat.query_starts[1:][samples] - 1, 0)

    def _write_tokens(self, here: Mapping[str, NDArray[Any]], values: Mapping[str, NDArray[Any]]) -> None:
        for name in _TOKEN_FIELDS:
            _fill(here[name], values.get(name, ()), _PADDING.get(name, 0))

    def _write_requests(self, here: Mapping[str, NDArray[Any]], values: Mapping[str, NDArray[Any]]) -> None:
        _fill(here["context_lengths"], values.get("context_lengths", ()), 1)
        _fill(here["table_rows"], values.get("table_rows", ()), self._padding_row)

    def _write_rules(self, here: Mapping[str, NDArray[Any]], values: Mapping[str, NDArray[Any]]) -> None:
        for name in _SAMPLING_FIELDS:
            _fill(here[name], values.get(name, ()), 0)

    def _write_entries(
        self, here: Mapping[str, NDArray[Any]], places: NDArray[np.int64], blocks: NDArray[np.int32]
    ) -> None:
        """The entries beyond them write zeros to the row of padding."""
        _fill(here["new_places"], places, self._padding_row * self._tables.width)
        _fill(here["new_blocks"], blocks, 0)


def _fill(array: NDArray[Any], values: NDArray[Any] | tuple[()], rest: int) -> None:
    """Set the first elements to ``values`` and all others to ``rest``."""
    array[: len(values)] = values
    array[len(values) :] = rest
