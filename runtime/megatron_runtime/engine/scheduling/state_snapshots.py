"""Slots for the recurrent states at the ends of cached blocks; pure bookkeeping."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable


class StateSnapshots:
    """Which block of the prefix cache has a copy of the states after its last token, and in which slot.

    A snapshot is dropped with its block. One that is added to full slots replaces the least recently used one.

    Args:
        num_slots: Most snapshots, at least 1.
    """

    def __init__(self, num_slots: int) -> None:
        assert num_slots > 0, "snapshots need slots"
        self._num_slots = num_slots
        self._slots: OrderedDict[int, int] = OrderedDict()
        """Slots by block, the least recently used first."""
        self._free = list(range(num_slots - 1, -1, -1))

    def __contains__(self, block: int) -> bool:
        return block in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, block: int) -> int:
        """The slot for the states at the end of a block without a snapshot."""
        assert block not in self._slots, f"block {block} has a snapshot"
        slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
        self._slots[block] = slot
        return slot

    def use(self, blocks: Iterable[int]) -> int:
        """The slot of the last one of the blocks of a prefix; all snapshots of the prefix are recently used now.

        The first is the most recently used one: more prompts begin with it.
        """
        path = [block for block in blocks if block in self._slots]
        for block in reversed(path):
            self._slots.move_to_end(block)
        return self._slots[path[-1]]

    def drop(self, block: int) -> None:
        """Drop the snapshot of a block, if it has one."""
        if block in self._slots:
            self._free.append(self._slots.pop(block))

    def clear(self) -> None:
        """Drop all snapshots."""
        self._free += self._slots.values()
        self._slots.clear()

    def check_integrity(self, registered: Collection[int]) -> None:
        """Assert that each slot has one snapshot or is free, and that only registered blocks have snapshots."""
        assert sorted([*self._free, *self._slots.values()]) == list(range(self._num_slots)), "a slot is lost or shared"
        assert all(block in registered for block in self._slots), "a block with a snapshot is not registered"
