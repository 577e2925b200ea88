"""Which KV blocks are free, and how many sequences share the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from megatron_runtime.engine.scheduling.prefix_cache import PrefixCache


class BlockAllocator:
    """A pool of ``num_blocks`` numbered blocks, each free or owned by one or several sequences.

    With a prefix cache, a free block may rest there for its contents, until it is owned again or its room is needed.
    Of the others, the block freed last is given out first: its memory is the likeliest to be in a processor's cache.

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
        """Blocks that nobody owns, evictable ones among them."""
        return len(self._free) + self.num_evictable

    @property
    def num_evictable(self) -> int:
        """Free blocks that the prefix cache keeps for their contents."""
        return 0 if self.prefixes is None else self.prefixes.num_evictable

    @property
    def num_used(self) -> int:
        """Blocks that somebody owns."""
        return self.num_blocks - self.num_free

    @property
    def num_owners(self) -> int:
        """Owners of all blocks together: a block that several share counts several times."""
        return sum(self._owners)

    def held(self) -> list[int]:
        """The blocks whose contents somebody may still want: owned ones, and evictable ones."""
        free = set(self._free)
        return [block for block in range(self.num_blocks) if block not in free]

    def can_allocate(self, count: int, *, besides: Iterable[int] = ()) -> bool:
        """True if so many blocks are free that are not among others, which may rest or be owned."""
        evictable = 0 if self.prefixes is None else sum(self.prefixes.is_evictable(block) for block in besides)
        return count <= self.num_free - evictable

    def allocate(self, count: int) -> list[int]:
        """Take so many free blocks; can_allocate has to be true. Resting ones go last, and lose their contents."""
        assert self.can_allocate(count), f"{count} blocks asked for, {self.num_free} free"
        if count == 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        while self.prefixes is not None and len(taken) < count:
            taken.append(self.prefixes.evict())
        for block in taken:
            self._owners[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Own blocks that others own, or that rest, once more."""
        assert self.prefixes is not None, "nothing is shared without a prefix cache"
        for block in blocks:
            if self.prefixes.is_evictable(block):
                self.prefixes.wake(block)
            else:
                assert self._owners[block], f"block {block} is free and can't be shared"
            self._owners[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Give owned blocks back; those of one sequence from its last to its first, as the prefix cache wants it."""
        for block in blocks:
            assert self._owners[block], f"block {block} freed twice"
            self._owners[block] -= 1
            if not self._owners[block] and (self.prefixes is None or not self.prefixes.rest(block)):
                self._free.append(block)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; who owns a block keeps it."""
        if self.prefixes is not None:
            self._free += self.prefixes.clear()

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Assert that the blocks owned by all sequences together are exactly those given out."""
        listed = Counter(owned)
        for block, owners in enumerate(self._owners):
            assert listed[block] == owners, f"block {block} has {listed[block]} owners, but {owners} are noted"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert not any(self._owners[block] for block in self._free), "a block is both free and given out"
        assert len(listed) == self.num_used, f"{self.num_used} blocks given out, {len(listed)} owned"
        if self.prefixes is None:
            assert all(owners <= 1 for owners in self._owners), "a block is owned twice"
        else:
            self.prefixes.check_integrity(self._owners)
            assert not any(block in self.prefixes for block in self._free), "a free block can be found"
