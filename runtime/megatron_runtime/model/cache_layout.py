"""The shape of a rank's KV cache. Without torch, because the preflight uses it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_CHOSEN_PART = 4
"""Snapshots get at most one of this number of parts of what the states of a chosen number of sequences leave."""
_SLOTS_PER_SNAPSHOT = 3
"""Otherwise, one of this number of slots for states has a snapshot."""


class PoolShares(NamedTuple):
    """What a pool has room for."""

    sequences: int
    blocks: int
    snapshots: int
    """Copies of the states of a sequence, for the prefix cache."""


@dataclass(frozen=True)
class CacheLayout:
    """The cached data of each token on one rank: in each layer ``heads`` keys and as many values. Widths count
    elements.
    """

    num_layers: int
    heads: int
    key_width: int
    value_width: int
    values_in_keys: bool = False
    """Whether the last ``value_width`` elements of a key are the value, so that values take no memory of their own."""
    state_bytes: int = 0
    """Bytes of the recurrent states of one sequence; 0 in a model without recurrent layers."""

    @property
    def widths(self) -> tuple[int, ...]:
        """The row width of each array of a layer: of keys and values, or of keys alone."""
        return (self.key_width,) if self.values_in_keys else (self.key_width, self.value_width)

    def shapes(self, num_blocks: int, block_size_tokens: int) -> list[tuple[int, ...]]:
        """The arrays of a pool, each [num_layers, num_blocks, heads, block_size_tokens, width].

        Heads come before tokens, so that the part of a block that one head reads is contiguous.
        """
        return [(self.num_layers, num_blocks, self.heads, block_size_tokens, width) for width in self.widths]

    def block_bytes(self, block_size_tokens: int, element_bytes: int) -> int:
        """Bytes of one block in all layers."""
        return self.num_layers * self.heads * block_size_tokens * sum(self.widths) * element_bytes

    def smallest_pool(self, block_bytes: int) -> int:
        """Bytes of the smallest pool that `divide` accepts: the states and a block of one sequence."""
        return self.state_bytes + block_bytes

    def divide(
        self,
        num_bytes: int,
        block_bytes: int,
        sequences: int,
        *,
        is_chosen: bool,
        has_snapshots: bool = False,
        least_blocks: int = 1,
    ) -> PoolShares:
        """The sequences that a pool of this size has states for, its blocks, and its snapshots of states.

        Without states, ``sequences`` is no limit, and there are no snapshots. Otherwise each sequence has a block, and
        unless the number ``is_chosen`` by the user, states and snapshots together take at most half of the pool.

        Args:
            num_bytes: Not below `smallest_pool`.
            block_bytes: Of one block; may include those of another model.
            sequences: Most sequences.
            is_chosen: Whether the user chose the number of sequences.
            has_snapshots: Whether the prefix cache is wanted, which needs snapshots.
            least_blocks: Blocks that snapshots leave, if there are as many.
        """
        if not self.state_bytes:
            return PoolShares(sequences, num_bytes // block_bytes, 0)
        sequences = min(sequences, num_bytes // self.smallest_pool(block_bytes))
        snapshots = 0
        if is_chosen:
            left = num_bytes - sequences * self.state_bytes
            if has_snapshots:
                spare = left - max(least_blocks, sequences) * block_bytes
                snapshots = max(min(left // _CHOSEN_PART, spare), 0) // self.state_bytes
        else:
            slots = max(1, num_bytes // 2 // self.state_bytes)
            if has_snapshots:
                snapshots = slots // _SLOTS_PER_SNAPSHOT
            sequences = min(sequences, slots - snapshots)
        return PoolShares(sequences, (num_bytes - (sequences + snapshots) * self.state_bytes) // block_bytes, snapshots)
