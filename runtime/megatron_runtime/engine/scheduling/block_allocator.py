"""Allocates KV blocks, and counts the owners of shared ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from megatron_runtime.engine.scheduling.prefix_cache import PrefixCache
from megatron_runtime.engine.scheduling.sequence import Sequence


class BlockAllocator:
    """A pool of ``num_blocks`` numbered blocks, each free or owned by one or several sequences.

    With a prefix cache, a free block may be evictable: the cache keeps its contents until it is owned again or evicted.
    Of the other free blocks, the one freed last is allocated first: its memory is most likely in a CPU cache.

    Args:
        num_blocks: Size of the pool.
        prefixes: The prefix cache over these blocks, if there is one.
    """

    def __init__(self, num_blocks: int, prefixes: PrefixCache | None = None) -> None:
        self.num_blocks = num_blocks
        self.prefixes = prefixes
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owners = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Number of blocks without an owner, including evictable ones."""
        return len(self._free) + self.num_evictable

    @property
    def num_evictable(self) -> int:
        """Number of free blocks whose contents the prefix cache keeps."""
        return 0 if self.prefixes is None else self.prefixes.num_evictable

    @property
    def num_used(self) -> int:
        """Number of blocks with an owner."""
        return self.num_blocks - self.num_free

    @property
    def num_owners(self) -> int:
        """Sum of the owners of all blocks: a shared block counts once per owner."""
        return sum(self._owners)

    def held(self) -> list[int]:
        """The blocks whose contents are in use: owned and evictable ones."""
        free = set(self._free)
        return [block for block in range(self.num_blocks) if block not in free]

    def can_allocate(self, count: int, *, besides: Iterable[int] = ()) -> bool:
        """True if this number of blocks is free, not counting those in ``besides``, which may be evictable or owned."""
        return count <= self.num_free_besides(besides)

    def num_free_besides(self, blocks: Iterable[int]) -> int:
        """Number of blocks without an owner, not counting these, which may be evictable or owned."""
        return self.num_free - (0 if self.prefixes is None else sum(map(self.prefixes.is_evictable, blocks)))

    def num_owners_of(self, block: int) -> int:
        """Number of owners of one block."""
        return self._owners[block]

    def allocate(self, count: int) -> list[int]:
        """Allocate free blocks; can_allocate has to be true. Evictable ones are used last, and lose their contents."""
        assert self.can_allocate(count), f"{count} blocks requested, {self.num_free} free"
        if count == 0:
            return []
        allocated = self._free[-count:][::-1]
        del self._free[-count:]
        while self.prefixes is not None and len(allocated) < count:
            allocated.append(self.prefixes.evict())
        for block in allocated:
            self._owners[block] = 1
        return allocated

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to blocks that are owned or evictable."""
        assert self.prefixes is not None, "blocks are shared only with a prefix cache"
        for block in blocks:
            if self.prefixes.is_evictable(block):
                self.prefixes.reuse(block)
            else:
                assert self._owners[block], f"block {block} is free and can't be shared"
            self._owners[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Remove an owner from blocks; those of one sequence from the last to the first, for the prefix cache."""
        for block in blocks:
            assert self._owners[block], f"block {block} freed twice"
            self._owners[block] -= 1
            if not self._owners[block] and (self.prefixes is None or not self.prefixes.retain(block)):
                self._free.append(block)

    def register(self, sequence: Sequence) -> bool:
        """Register the computed blocks of a sequence in the prefix cache; True if known ones replaced some of them."""
        assert self.prefixes is not None, "blocks are registered only with a prefix cache"
        replaced = self.prefixes.register(sequence)
        for own, known in replaced:
            self.share([known])
            self.free([own])
        return bool(replaced)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; owned blocks stay owned."""
        if self.prefixes is not None:
            self._free += self.prefixes.clear()

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Assert that the blocks of all sequences are exactly the allocated ones."""
        listed = Counter(owned)
        for block, owners in enumerate(self._owners):
            assert listed[block] == owners, f"block {block} has {listed[block]} owners, but {owners} are recorded"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert not any(self._owners[block] for block in self._free), "a block is both free and allocated"
        assert len(listed) == self.num_used, f"{self.num_used} blocks allocated, {len(listed)} owned"
        if self.prefixes is None:
            assert all(owners <= 1 for owners in self._owners), "a block is owned twice"
        else:
            self.prefixes.check_integrity(self._owners)
            assert not any(block in self.prefixes for block in self._free), "a free block is registered"
