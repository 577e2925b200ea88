"""The tables of KV blocks on the host, and what has changed in them for a copy on a device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_runtime.engine.block_tables import BlockTables
from megatron_runtime.engine.scheduling.sequence import Sequence

SIZE = 4


def sequence(row: int, blocks: list[int]) -> Sequence:
    """Running in this row."""
    return Sequence(0, [1], prompt_length=1, max_length=99, blocks=blocks, row=row)


class Mirror:
    """A copy that gets the changes alone."""

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self.blocks: NDArray[np.int32] = np.full(3 * tables.width, -1, np.int32)

    def update(self) -> int:
        """The number of changes."""
        places, blocks = self._tables.pop_changes()
        assert len(set(places.tolist())) == len(places)
        self.blocks[places] = blocks
        return len(places)

    def row(self, row: int) -> list[int]:
        """Its first blocks."""
        return self.blocks.reshape(3, -1)[row, :3].tolist()


def test_changes_are_what_was_written_since_the_last_call() -> None:
    tables = BlockTables(3, 5, SIZE)
    mirror = Mirror(tables)
    first, second = sequence(0, [7, 8]), sequence(2, [9])
    assert [tables.sync(each) for each in (first, second, first)] == [0, 2, 0]
    assert mirror.update() == 3
    assert mirror.update() == 0
    first.blocks.append(3)
    tables.sync(first)
    assert mirror.update() == 1
    assert (mirror.row(0), mirror.row(2)) == ([7, 8, 3], [9, -1, -1])


def test_a_row_that_another_sequence_gets_is_written_anew() -> None:
    tables = BlockTables(3, 5, SIZE)
    mirror = Mirror(tables)
    tables.sync(sequence(1, [7, 8]))
    mirror.update()
    tables.sync(sequence(1, [7, 8, 9]))
    tables.clear(1)
    tables.sync(sequence(1, [5]))
    assert mirror.update() == 1
    assert mirror.row(1)[:1] == [5]
    tables.clear(1)
    assert mirror.update() == 0


def test_all_entries_can_be_marked_as_changed() -> None:
    tables = BlockTables(3, 5, SIZE)
    tables.sync(sequence(0, [7, 8]))
    tables.sync(sequence(2, [9]))
    tables.pop_changes()
    tables.mark_all_changed()
    mirror = Mirror(tables)
    assert mirror.update() == 3
    assert (mirror.row(0)[:2], mirror.row(2)[:1]) == ([7, 8], [9])


def test_slots_and_padded_tables_follow_the_blocks() -> None:
    tables = BlockTables(3, 5, SIZE)
    tables.sync(sequence(0, [7, 8, 9]))
    tables.sync(sequence(2, [1]))
    rows = np.array([0, 2])
    assert tables.slots(rows, np.array([5, 3])).tolist() == [8 * SIZE + 1, SIZE + 3]
    assert tables.padded(rows, np.array([6, 4])).tolist() == [[7, 8], [1, 0]]
