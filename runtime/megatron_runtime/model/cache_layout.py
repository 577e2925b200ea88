"""The shape of a rank's KV cache. Without torch, because the preflight uses it too."""

from __future__ import annotations

from dataclasses import dataclass


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

    def smallest_pool(self, block_size_tokens: int, element_bytes: int) -> int:
        """Bytes of the smallest pool that `divide` accepts: the states and a block of one sequence."""
        return self.state_bytes + self.block_bytes(block_size_tokens, element_bytes)

    def divide(
        self, num_bytes: int, block_size_tokens: int, element_bytes: int, sequences: int, *, is_chosen: bool
    ) -> tuple[int, int]:
        """The sequences that a pool of this size has states for, and its blocks. It is not below `smallest_pool`.

        There are at most ``sequences``, each of them with a block. Unless that number ``is_chosen`` by the user, states
        take at most half of the pool. Without states, it is no limit.
        """
        if self.state_bytes:
            sequences = min(sequences, num_bytes // self.smallest_pool(block_size_tokens, element_bytes))
            if not is_chosen:
                sequences = min(sequences, max(1, num_bytes // 2 // self.state_bytes))
        rest = num_bytes - sequences * self.state_bytes
        return sequences, rest // self.block_bytes(block_size_tokens, element_bytes)
