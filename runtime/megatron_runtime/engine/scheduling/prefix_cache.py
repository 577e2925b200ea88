"""Which blocks hold the keys and values of which beginnings of prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_runtime.config import PrefixCachingEvictionPolicy
from megatron_runtime.engine.scheduling.sequence import Sequence

_NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class _Entry:
    block: int
    block_hash: int
    tokens: tuple[int, ...]
    parent: int
    """Block of the tokens before these."""


class PrefixCache:
    """An index of complete, computed blocks by the hash of all tokens up to their end; pure bookkeeping.

    Hashes only find candidates: a hit also has the same tokens and the same parent block, so by induction the same
    whole prefix, and different prompts of equal hash never share keys and values. Of blocks with equal hashes, the
    first one registered stays.

    A block is registered by a sequence that owns its parent, and is only ever shared together with all blocks before
    it. So a parent has at least the owners of its children, and blocks that are released from the last to the first
    come to rest children first: the order of rest is an order of eviction in which no parent goes before its child.

    Args:
        policy: What becomes of a block that nobody owns any more.
        block_size_tokens: Tokens per block.
    """

    def __init__(self, policy: PrefixCachingEvictionPolicy, block_size_tokens: int) -> None:
        self._policy = policy
        self._block_size = block_size_tokens
        self._by_hash: dict[int, _Entry] = {}
        self._by_block: dict[int, _Entry] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    @property
    def num_registered(self) -> int:
        """Blocks that a prompt can find, owned or not."""
        return len(self._by_block)

    @property
    def num_evictable(self) -> int:
        """Blocks that nobody owns and that are kept for their contents."""
        return len(self._evictable)

    def match(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest known prefix that the sequence may skip, first block first.

        What is left to compute is never empty, and holds every token whose logits are wanted for log probabilities.
        """
        blocks: list[int] = []
        parent = _NO_PARENT
        for index in range(self._most_skipped(sequence)):
            entry = self._by_hash.get(sequence.block_hashes[index])
            if entry is None or entry.parent != parent or entry.tokens != self._tokens(sequence, index):
                break
            blocks.append(parent := entry.block)
        return blocks

    def begin(self, sequence: Sequence, num_matched: int) -> None:
        """Note that the sequence runs from here on, on so many matched blocks.

        What it may register are the blocks that its tokens of now fill: those of tokens still to be generated come
        from a computation that is rounded differently from a prefill.
        """
        sequence.num_registered = num_matched
        sequence.num_registrable = min(len(sequence.block_hashes), len(sequence.tokens) // self._block_size)

    def register(self, sequence: Sequence) -> None:
        """Make the blocks that were computed since last time known to others."""
        for index in range(sequence.num_registered, self._last_complete(sequence, sequence.num_computed)):
            block_hash = sequence.block_hashes[index]
            if block_hash in self._by_hash:
                # Its later blocks would need this one as their parent.
                sequence.num_registrable = index
                return
            parent = sequence.blocks[index - 1] if index else _NO_PARENT
            entry = _Entry(sequence.blocks[index], block_hash, self._tokens(sequence, index), parent)
            self._by_hash[block_hash] = self._by_block[entry.block] = entry
            sequence.num_registered = index + 1

    def upcoming(self, sequence: Sequence) -> dict[int, tuple[int, ...]]:
        """Hashes and tokens of the blocks that will be registered once what was begun is computed."""
        indices = range(sequence.num_registered, self._last_complete(sequence, sequence.num_begun))
        return {sequence.block_hashes[index]: self._tokens(sequence, index) for index in indices}

    def is_next(self, sequence: Sequence, num_matched: int, upcoming: dict[int, tuple[int, ...]]) -> bool:
        """True if the first block that the sequence does not find is among the upcoming ones."""
        if num_matched >= self._most_skipped(sequence):
            return False
        return upcoming.get(sequence.block_hashes[num_matched]) == self._tokens(sequence, num_matched)

    def rest(self, block: int) -> bool:
        """The last owner has gone: True if the block is kept for its contents, False if it is free."""
        if block not in self._by_block:
            return False
        if self._policy is PrefixCachingEvictionPolicy.LRU:
            self._evictable[block] = None
            return True
        self._forget(block)
        return False

    def is_evictable(self, block: int) -> bool:
        """True if nobody owns the block and it is kept for its contents."""
        return block in self._evictable

    def wake(self, block: int) -> None:
        """Somebody owns the block again."""
        del self._evictable[block]

    def evict(self) -> int:
        """Forget the block that has rested for longest, which has no children, and return it."""
        block, _ = self._evictable.popitem(last=False)
        self._forget(block)
        return block

    def clear(self) -> list[int]:
        """Forget everything; the blocks that rested, which are free now."""
        rested = list(self._evictable)
        self._evictable.clear()
        self._by_block.clear()
        self._by_hash.clear()
        return rested

    def check_integrity(self, owners: Iterable[int]) -> None:
        """Assert that the index holds together.

        Args:
            owners: [num_blocks], how many sequences own each block.
        """
        owners = list(owners)
        assert len(self._by_hash) == len(self._by_block), "a block has no hash of its own"
        for block, entry in self._by_block.items():
            assert entry.block == block, f"block {block} is known by the name of another"
            assert self._by_hash[entry.block_hash] is entry, f"the hash of block {block} leads to another"
            assert (owners[block] == 0) == (block in self._evictable), f"block {block} rests and is owned, or neither"
            if entry.parent != _NO_PARENT:
                assert entry.parent in self._by_block, f"block {block} is known, but not what comes before it"
                assert owners[entry.parent] >= owners[block], f"block {block} is owned without what comes before it"
        assert self._evictable.keys() <= self._by_block.keys(), "a block rests that nobody can find"
        gone: set[int] = set()
        for block in self._evictable:
            assert self._by_block[block].parent not in gone, f"block {block} would be evicted after its parent"
            gone.add(block)

    def _forget(self, block: int) -> None:
        del self._by_hash[self._by_block.pop(block).block_hash]

    def _most_skipped(self, sequence: Sequence) -> int:
        needed = len(sequence.tokens) if sequence.next_log_prob is None else sequence.next_log_prob
        return min(len(sequence.block_hashes), max(0, needed - 1) // self._block_size)

    def _last_complete(self, sequence: Sequence, num_computed: int) -> int:
        return min(sequence.num_registrable, num_computed // self._block_size)

    def _tokens(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        return tuple(sequence.tokens[index * self._block_size : (index + 1) * self._block_size])
