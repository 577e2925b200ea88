"""The shape of a rank's KV cache. Without torch, because the preflight uses it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron_runtime.errors import ConfigurationError

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
class StateMemory:
    """What the user sets of the memory of recurrent states; None: `CacheLayout.divide` chooses."""

    ratio: float | None = None
    """Megatron's mamba_memory_ratio: the most that the states of running requests take of the pool without the
    snapshots."""
    snapshot_gb: float | None = None
    """Megatron's prefix_caching_mamba_gb: GiB of the pool for snapshots."""
    are_flags: bool = False
    """Whether errors name flags of megatron-serve instead of fields."""

    @property
    def snapshot_bytes(self) -> int:
        """Bytes for snapshots, as far as the user sets them."""
        return int((self.snapshot_gb or 0) * 2**30)

    def error(self, name: str, value: float | None, problem: str) -> ConfigurationError:
        """An error about one of Megatron's two settings."""
        origin = f"--{name.replace('_', '-')} {value}" if self.are_flags else f"{name}={value}"
        return ConfigurationError(f"{origin}: {problem}", field=name)


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

    def check(self, num_bytes: int, block_bytes: int, memory: StateMemory, architecture: str) -> None:
        """Check the settings for the states against a pool of this size, not below `smallest_pool`.

        Raises:
            ConfigurationError: There are no states to give a ratio, one of them does not fit, or no pool is left.
        """
        ratio, given, state = memory.ratio, memory.snapshot_bytes, self.state_bytes
        if not state:
            if ratio is not None:
                raise memory.error("mamba_memory_ratio", ratio, f"{architecture} has no recurrent layers; leave it out")
            return
        least = f"{1.006 * state / 2**30:.3g}"  # not rounded below the states
        if memory.snapshot_gb and given < state:
            problem = f"a copy of the states of a request takes {state} bytes ({least} GiB); set as much or more, or 0"
            raise memory.error("prefix_caching_mamba_gb", memory.snapshot_gb, problem)
        if num_bytes - given < self.smallest_pool(block_bytes):
            problem = (
                f"of the pool's {num_bytes} bytes, it leaves less than the {self.smallest_pool(block_bytes)} of the "
                "states of one request and a KV block; lower it, or give the KV cache more memory"
            )
            raise memory.error("prefix_caching_mamba_gb", memory.snapshot_gb, problem)
        if ratio is not None and int((num_bytes - given) * ratio) < state:
            problem = (
                f"this part of {num_bytes - given} bytes is less than the states of one request, {state} bytes "
                f"({least} GiB); raise it, or give the KV cache more memory"
            )
            raise memory.error("mamba_memory_ratio", ratio, problem)

    def divide(
        self,
        num_bytes: int,
        block_bytes: int,
        sequences: int,
        *,
        is_chosen: bool,
        has_snapshots: bool = False,
        least_blocks: int = 1,
        memory: StateMemory | None = None,
    ) -> PoolShares:
        """The sequences that a pool of this size has states for, its blocks, and its snapshots of states.

        Without states, ``sequences`` is no limit, and there are no snapshots. Otherwise each sequence has a block, and
        unless the number ``is_chosen`` by the user or their ratio is, states and snapshots together take at most half
        of the pool.

        Args:
            num_bytes: Not below `smallest_pool`; with ``memory``, it passes `check`.
            block_bytes: Of one block; may include those of another model.
            sequences: Most sequences.
            is_chosen: Whether the user chose the number of sequences.
            has_snapshots: Whether the prefix cache is wanted, which needs snapshots.
            least_blocks: Blocks that snapshots leave, if there are as many and the user does not set their memory.
            memory: What the user sets; the memory of snapshots has no effect without ``has_snapshots``.
        """
        if not self.state_bytes:
            return PoolShares(sequences, num_bytes // block_bytes, 0)
        memory = memory or StateMemory()
        kept = 0
        if has_snapshots and memory.snapshot_gb is not None:
            kept, has_snapshots = memory.snapshot_bytes // self.state_bytes, False
        num_bytes -= kept * self.state_bytes
        sequences = min(sequences, num_bytes // self.smallest_pool(block_bytes))
        if memory.ratio is not None:
            sequences, is_chosen = min(sequences, int(num_bytes * memory.ratio) // self.state_bytes), True
        snapshots = 0
        if not is_chosen:
            slots = max(1, num_bytes // 2 // self.state_bytes)
            snapshots = slots // _SLOTS_PER_SNAPSHOT if has_snapshots else 0
            sequences = min(sequences, slots - snapshots)
        elif has_snapshots:
            left = num_bytes - sequences * self.state_bytes
            spare = left - max(least_blocks, sequences) * block_bytes
            snapshots = max(min(left // _CHOSEN_PART, spare), 0) // self.state_bytes
        blocks = (num_bytes - (sequences + snapshots) * self.state_bytes) // block_bytes
        return PoolShares(sequences, blocks, kept + snapshots)
