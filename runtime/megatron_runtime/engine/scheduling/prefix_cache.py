"""Finds the blocks with the keys and values of known prompt prefixes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_runtime.config import PrefixCachingEvictionPolicy
from megatron_runtime.engine.scheduling.sequence import Sequence
from megatron_runtime.engine.scheduling.state_snapshots import StateSnapshots

_NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class _Entry:
    block: int
    block_hash: int
    tokens: tuple[int, ...]
    parent: int
    """The block of the preceding tokens."""


class PrefixCache:
    """An index of complete, computed blocks by the hash of all tokens up to their end; pure bookkeeping.

    Hashes only find candidates: a match also has the same tokens and the same parent block, so by induction the same
    whole prefix, and different prompts with equal hashes never share keys and values. Of blocks with equal hashes, the
    first registered one stays.

    A block is registered by a sequence that owns its parent, and is shared only together with all preceding blocks. So
    a parent has at least the owners of its children, and blocks that are freed from the last to the first become
    evictable children first: in the order in which blocks became evictable, no parent is evicted before its child.

    With recurrent layers, a sequence can begin only at the end of a block that has a snapshot of their states. A
    sequence that computes known blocks again, to reach the place where it needs a snapshot, then owns the known ones in
    place of its own. So its later blocks can be registered behind them.

    Args:
        policy: What happens to a block without an owner.
        block_size_tokens: Tokens per block.
        snapshots: The snapshots of recurrent states; None in a model without such layers.
    """

    def __init__(
        self, policy: PrefixCachingEvictionPolicy, block_size_tokens: int, snapshots: StateSnapshots | None = None
    ) -> None:
        self._policy = policy
        self._block_size = block_size_tokens
        self._snapshots = snapshots
        self._by_hash: dict[int, _Entry] = {}
        self._by_block: dict[int, _Entry] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    @property
    def num_registered(self) -> int:
        """Number of registered blocks, owned or not."""
        return len(self._by_block)

    @property
    def num_evictable(self) -> int:
        """Number of blocks without an owner whose contents are kept."""
        return len(self._evictable)

    def match(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest known prefix that the sequence can skip, in order.

        At least one token remains to be computed, and all tokens whose logits are needed for log probabilities or whose
        hidden states are pooled. With recurrent layers, the prefix ends at a snapshot.
        """
        blocks = self._known_blocks(sequence)
        while self._snapshots is not None and blocks and blocks[-1] not in self._snapshots:
            blocks.pop()
        return blocks

    def begin(self, sequence: Sequence, matched: list[int]) -> None:
        """Record that the sequence starts to run with matched blocks.

        It can register the blocks that its present tokens fill. Blocks of tokens generated later are not registered,
        since decoding rounds differently from a prefill.

        With recurrent layers it begins with the states of the last matched block, and leaves snapshots at the end of
        the known blocks, where its prompt branches off from another one, and at the last end of a block that the same
        prompt could skip.
        """
        sequence.num_registered = len(matched)
        sequence.num_registrable = min(len(sequence.block_hashes), len(sequence.tokens) // self._block_size)
        if self._snapshots is None:
            return
        last = min(sequence.num_registrable, (len(sequence.tokens) - 1) // self._block_size)
        ends = sorted({len(self._known_blocks(sequence)), last})
        sequence.snapshot_ends = [end * self._block_size for end in ends if end > len(matched)]
        sequence.first_snapshot = self._snapshots.use(matched) if matched else None

    def register(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Register the blocks that were computed since the last call.

        Returns:
            With recurrent layers, the blocks of the sequence that were known, as pairs of its own block and the known
            one, which replaces it in ``sequence.blocks``. The caller changes the owners.
        """
        replaced: list[tuple[int, int]] = []
        for index in range(sequence.num_registered, self._last_complete(sequence, sequence.num_computed)):
            block_hash, own = sequence.block_hashes[index], sequence.blocks[index]
            parent = sequence.blocks[index - 1] if index else _NO_PARENT
            known = self._by_hash.get(block_hash)
            if known is None:
                entry = _Entry(own, block_hash, self._tokens(sequence, index), parent)
                self._by_hash[block_hash] = self._by_block[own] = entry
            elif self._snapshots is not None and self._is_block(known, sequence, index, parent):
                sequence.blocks[index] = known.block
                replaced.append((own, known.block))
            else:
                # Its later blocks would have this one as their parent.
                sequence.num_registrable = index
                break
            sequence.num_registered = index + 1
        return replaced

    def snapshot(self, sequence: Sequence) -> int | None:
        """The slot for a snapshot of the states of a sequence after its computed tokens; None without one."""
        if self._snapshots is None or sequence.num_computed not in sequence.snapshot_ends[:1]:
            return None
        num_blocks = sequence.snapshot_ends.pop(0) // self._block_size
        block = sequence.blocks[num_blocks - 1]
        if sequence.num_registered < num_blocks or block in self._snapshots:
            return None
        return self._snapshots.add(block)

    def upcoming(self, sequence: Sequence) -> dict[int, tuple[int, ...]]:
        """Hashes and tokens of the blocks that will be registered when the passes in flight are computed.

        With recurrent layers: those of the blocks at whose ends the sequence will leave snapshots.
        """
        indices: Iterable[int] = range(sequence.num_registered, self._last_complete(sequence, sequence.num_begun))
        if self._snapshots is not None:
            indices = [end // self._block_size - 1 for end in sequence.snapshot_ends]
        return {sequence.block_hashes[index]: self._tokens(sequence, index) for index in indices}

    def is_next(self, sequence: Sequence, num_matched: int, upcoming: dict[int, tuple[int, ...]]) -> bool:
        """True if the first block after the matched ones is among the upcoming ones; with recurrent layers, any."""
        end = self._max_skipped(sequence)
        indices = range(num_matched, end if self._snapshots is not None else min(num_matched + 1, end))
        hashes = sequence.block_hashes
        return any(upcoming.get(hashes[index]) == self._tokens(sequence, index) for index in indices)

    def retain(self, block: int) -> bool:
        """Keep the contents of a block without an owner: True if it is evictable now, False if it is free."""
        if block not in self._by_block:
            return False
        if self._policy is PrefixCachingEvictionPolicy.LRU:
            self._evictable[block] = None
            return True
        self._forget(block)
        return False

    def is_evictable(self, block: int) -> bool:
        """True if the block has no owner and its contents are kept."""
        return block in self._evictable

    def reuse(self, block: int) -> None:
        """An evictable block has an owner again."""
        del self._evictable[block]

    def evict(self) -> int:
        """Remove and return the least recently used evictable block, which has no children."""
        block, _ = self._evictable.popitem(last=False)
        self._forget(block)
        return block

    def clear(self) -> list[int]:
        """Remove all blocks; returns those that were evictable, which are free now."""
        evictable = list(self._evictable)
        self._evictable.clear()
        self._by_block.clear()
        self._by_hash.clear()
        if self._snapshots is not None:
            self._snapshots.clear()
        return evictable

    def check_integrity(self, owners: Iterable[int]) -> None:
        """Assert that the index is consistent.

        Args:
            owners: [num_blocks], number of owners of each block.
        """
        owners = list(owners)
        assert len(self._by_hash) == len(self._by_block), "two blocks have the same hash"
        for block, entry in self._by_block.items():
            assert entry.block == block, f"block {block} is registered as another one"
            assert self._by_hash[entry.block_hash] is entry, f"the hash of block {block} is that of another one"
            assert (owners[block] == 0) == (block in self._evictable), (
                f"block {block} is evictable and owned, or neither"
            )
            if entry.parent != _NO_PARENT:
                assert entry.parent in self._by_block, f"block {block} is registered, but not its parent"
                assert owners[entry.parent] >= owners[block], f"block {block} has more owners than its parent"
        assert self._evictable.keys() <= self._by_block.keys(), "an evictable block is not registered"
        evicted: set[int] = set()
        for block in self._evictable:
            assert self._by_block[block].parent not in evicted, f"block {block} would be evicted after its parent"
            evicted.add(block)
        if self._snapshots is not None:
            self._snapshots.check_integrity(self._by_block)

    def _known_blocks(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest known prefix that can be skipped as far as its logits and hidden states matter."""
        blocks: list[int] = []
        parent = _NO_PARENT
        for index in range(self._max_skipped(sequence)):
            entry = self._by_hash.get(sequence.block_hashes[index])
            if entry is None or not self._is_block(entry, sequence, index, parent):
                break
            blocks.append(parent := entry.block)
        return blocks

    def _is_block(self, entry: _Entry, sequence: Sequence, index: int, parent: int) -> bool:
        """True if a block with the hash of a sequence's one also has its tokens and its parent."""
        return entry.parent == parent and entry.tokens == self._tokens(sequence, index)

    def _forget(self, block: int) -> None:
        del self._by_hash[self._by_block.pop(block).block_hash]
        if self._snapshots is not None:
            self._snapshots.drop(block)

    def _max_skipped(self, sequence: Sequence) -> int:
        if sequence.pooling == "mean":
            return 0
        needed = len(sequence.tokens) if sequence.next_log_prob is None else sequence.next_log_prob
        return min(len(sequence.block_hashes), max(0, needed - 1) // self._block_size)

    def _last_complete(self, sequence: Sequence, num_computed: int) -> int:
        return min(sequence.num_registrable, num_computed // self._block_size)

    def _tokens(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        return tuple(sequence.tokens[index * self._block_size : (index + 1) * self._block_size])
