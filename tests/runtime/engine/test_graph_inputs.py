"""The inputs of passes on CUDA graphs, with their padding."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_runtime.engine.block_tables import BlockTables
from megatron_runtime.engine.graph_inputs import GraphInputs
from megatron_runtime.engine.graph_sizes import GraphSize
from megatron_runtime.engine.sampling.exponential_noise import noise_keys
from megatron_runtime.engine.sampling.sampling_table import SamplingRules
from megatron_runtime.engine.scheduling.sequence import Sequence, SequenceSlice

ROWS = 4
"""Of the block tables, each of 3 blocks of 4 tokens."""


def part_of(row: int, start: int, end: int, known: int) -> SequenceSlice:
    """The slice of a sequence with this row, of which so many tokens are known."""
    sequence = Sequence(row, [10 * row + at for at in range(known)], known, 12)
    sequence.row, sequence.blocks = row, [20 + 3 * row, 21 + 3 * row]
    return SequenceSlice(sequence, start, end, end == known, 0, 0)


def rules_of(count: int) -> SamplingRules:
    """With temperatures from 1 on."""
    keys = noise_keys(np.arange(count, dtype=np.uint64), np.zeros(count, np.int64))
    return SamplingRules(np.arange(1, count + 1, dtype=np.float32), keys)


def test_padding_follows_prompts_and_logits_are_those_of_the_requests_that_sample() -> None:
    """The first request does not sample, and arrays have the values of a larger pass before."""
    inputs = GraphInputs(BlockTables(ROWS, 3, 4), ROWS, GraphSize(12, 6))
    here: dict[str, Any] = {name: np.full(size, 77, dtype) for name, (dtype, size) in inputs.fields.items()}
    slices = [part_of(1, 2, 5, 8), part_of(3, 6, 7, 7), part_of(0, 0, 2, 2)]
    assert inputs.write(here, slices, GraphSize(10, 5), rules_of(2)) == {}
    written = {name: values.tolist() for name, values in here.items()}
    assert written["tokens"] == [12, 13, 14, 36, 0, 1, *[0] * 6]
    assert written["positions"] == [2, 3, 4, 6, 0, 1, *[0] * 6]
    assert written["slots"] == [23 * 4 + 2, 23 * 4 + 3, 24 * 4, 30 * 4 + 2, 20 * 4, 20 * 4 + 1, *[-1] * 6]
    assert written["query_starts"] == [0, 3, 4, 6, 6, 6, 6]
    assert written["context_lengths"] == [5, 7, 2, 1, 1, 1]
    assert written["table_rows"] == [1, 3, 0, ROWS, ROWS, ROWS]
    assert written["logit_rows"] == [3, 5, 0, 0, 0, 0]
    assert written["temperature"] == [1, 2, 0, 0, 0, 0]
    entries = dict(zip(written["new_places"], written["new_blocks"], strict=True))
    assert entries == {3: 23, 4: 24, 9: 29, 10: 30, 0: 20, 1: 21, 3 * ROWS: 0}


def test_entries_of_the_tables_beyond_the_room_are_returned() -> None:
    inputs = GraphInputs(BlockTables(ROWS, 3, 4), ROWS, GraphSize(2, 1))
    here: dict[str, Any] = {name: np.zeros(size, dtype) for name, (dtype, size) in inputs.fields.items()}
    more = inputs.write(here, [part_of(2, 4, 6, 6)], GraphSize(2, 1), rules_of(1))
    assert here["new_places"].tolist() == [6]
    assert (more["places"].tolist(), more["blocks"].tolist()) == ([7], [27])
