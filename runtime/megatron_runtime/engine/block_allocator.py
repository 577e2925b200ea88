"""Which KV blocks are free."""

from __future__ import annotations

from collections.abc import Iterable


class BlockAllocator:
    """A pool of ``num_blocks`` numbered blocks, each free or owned by exactly one sequence.

    The block freed last is given out first: its memory is the likeliest to be in a cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody owns."""
        return self.num_blocks - len(self._free)

    def can_allocate(self, count: int) -> bool:
        """True if so many blocks are free."""
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take so many free blocks; can_allocate has to be true."""
        assert self.can_allocate(count), f"{count} blocks asked for, {self.num_free} free"
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        for block in taken:
            self._used[block] = 1
        return taken

    def free(self, blocks: Iterable[int]) -> None:
        """Give owned blocks back."""
        for block in blocks:
            assert self._used[block], f"block {block} freed twice"
            self._used[block] = 0
            self._free.append(block)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Assert that the blocks owned by all sequences together are exactly those given out."""
        listed = list(owned)
        assert len(set(listed)) == len(listed), "a block is owned twice"
        assert len(listed) == self.num_used, f"{self.num_used} blocks given out, {len(listed)} owned"
        assert all(self._used[block] for block in listed), "a free block is owned"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert not any(self._used[block] for block in self._free), "a block is both free and given out"
