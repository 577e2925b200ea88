"""The keys and values of every token in flight, in blocks of equal size; and recurrent states, in slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_runtime.model.attention_kind import attention_kind
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.host_memory import zeros
from megatron_runtime.model.recurrent_states import RecurrentStates

if TYPE_CHECKING:
    from megatron_runtime.gpu.arena import Arena

FLOAT8 = torch.float8_e4m3fn
"""The type of a cache in fp8."""
LayerCache = tuple[Tensor, ...]
"""The arrays of one layer, as described by its CacheLayout: each [num_blocks, heads, block_size_tokens, width]. Those
of a recurrent layer are its states: each [num_states + num_snapshots, ...]. Those of a cache in fp8 are uint8."""


class KVCache:
    """A pool of ``num_blocks`` blocks, each with room for ``block_size_tokens`` tokens in every layer with attention.

    The scheduler assigns blocks to requests; the pool only stores their contents. With recurrent layers it also has
    the states of ``num_states`` sequences, and ``num_snapshots`` copies of states for the prefix cache. With
    ``keeps_addresses`` the blocks are at the same addresses of a GPU after each `restore`; the states may not be.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        num_states: int = 1,
        num_snapshots: int = 0,
        keeps_addresses: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self.dtype = dtype
        """Of keys and values. E4M3 is stored as bytes, which all operators can copy."""
        self._stored = torch.uint8 if dtype is FLOAT8 else dtype
        self.device = torch.device(device)
        self.layout = attention_kind(config).cache_layout
        """What is cached of each token."""
        self._shapes = self.layout.shapes(num_blocks, block_size_tokens)
        self._kinds = [config.kind(layer) for layer in range(config.num_layers)]
        self._places = [self._kinds[:layer].count(kind) for layer, kind in enumerate(self._kinds)]
        """Of each layer, its place among those of the same kind."""
        self._states: RecurrentStates | None = None
        if config.recurrent is not None:
            self._states = RecurrentStates(config.recurrent, num_states + num_snapshots, self.device)
        self._num_states = num_states
        self._arena: Arena | None = None
        if keeps_addresses:
            from megatron_runtime.gpu.arena import Arena  # Not needed on other devices.

            self._arena = Arena(self.device, [math.prod(shape) * dtype.itemsize for shape in self._shapes])
        self._storage: list[Tensor] | None = None
        self._offloaded: tuple[Tensor, list[Tensor]] | None = None
        """Block numbers, and the contents of these blocks in each array."""
        self.restore()

    @staticmethod
    def block_bytes(config: ModelConfig, block_size_tokens: int, dtype: torch.dtype) -> int:
        """Bytes of one block in all layers of ``config``."""
        return attention_kind(config).cache_layout.block_bytes(block_size_tokens, dtype.itemsize)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool while it is resident."""
        states = 0 if self._states is None else self._states.num_bytes
        return sum(math.prod(shape) for shape in self._shapes) * self.dtype.itemsize + states

    @property
    def keeps_addresses(self) -> bool:
        """Whether all blocks return to their addresses."""
        return self._arena is not None

    @property
    def is_resident(self) -> bool:
        """Whether the pool is on its device, so that a forward pass can use it."""
        return self._storage is not None

    @property
    def identity(self) -> tuple[object, ...]:
        """Addresses, shapes and type of the blocks while the pool is resident."""
        assert self._storage is not None, "the cache was released or offloaded"
        return (*(array.data_ptr() for array in self._storage), *self._shapes, self.dtype)

    def layer(self, index: int) -> LayerCache:
        """Views of one layer's arrays; none of a layer with a feed-forward network alone."""
        if self._kinds[index] == "feed_forward":
            return ()
        if self._states is not None and self._kinds[index] == "recurrence":
            return self._states.layer(self._places[index])
        return self._blocks_of(self._places[index])

    def store_snapshot(self, slot: int, snapshot: int) -> None:
        """Copy the states of a sequence's slot to a snapshot."""
        assert self._states is not None, "the model has no states"
        self._states.copy(slot, self._num_states + snapshot)

    def load_snapshot(self, snapshot: int, slot: int) -> None:
        """Copy the states of a snapshot to a sequence's slot."""
        assert self._states is not None, "the model has no states"
        self._states.copy(self._num_states + snapshot, slot)

    def _blocks_of(self, place: int) -> LayerCache:
        assert self._storage is not None, "the cache was released or offloaded"
        return tuple(array[place] for array in self._storage)

    def release(self) -> None:
        """Release the memory and the contents."""
        self._release_blocks()
        self._offloaded = None
        if self._states is not None:
            self._states.release()

    def offload(self, kept: Sequence[int]) -> None:
        """Release the pool's memory, and keep a copy of some blocks' contents and of all states in host memory.

        On a CPU the copies replace the pool, so memory decreases to that of the kept blocks.
        """
        if self._storage is not None:
            self._offloaded = self._copies(self._storage, kept)
        self._release_blocks()
        if self._states is not None:
            self._states.offload()

    def restore(self) -> None:
        """Make the cache resident again, with the kept contents after `offload`, and zeros elsewhere.

        Zeros, because masked keys take part in the softmax, and uninitialized memory may contain NaN.

        Raises:
            torch.OutOfMemoryError: A GPU has too little memory; what was kept is still there, for another call.
        """
        if self._storage is not None:
            return
        if self._states is not None:
            self._states.restore()
        storage = self._zeros()
        if self._offloaded is not None:
            blocks, copies = self._offloaded
            for array, contents in zip(storage, copies, strict=True):
                for layer, copy in zip(array, contents, strict=True):
                    layer[blocks.to(self.device)] = copy.to(self.device)
        self._storage, self._offloaded = storage, None

    def _copies(self, storage: list[Tensor], kept: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        blocks = torch.tensor(kept, dtype=torch.int64)
        copies = []
        for array in storage:
            copies.append(torch.empty((len(array), len(kept), *array.shape[2:]), dtype=self._stored))
            for copy, layer in zip(copies[-1], array, strict=True):
                # Layer by layer, because gathering needs device memory, which may be full.
                copy.copy_(layer[blocks.to(self.device)])
        return blocks, copies

    def _zeros(self) -> list[Tensor]:
        if self.device.type == "cpu":
            # No write: filling a gibibyte with zeros takes as long as loading a small model.
            return [zeros(shape, self._stored) for shape in self._shapes]
        if self._arena is None:
            return [torch.zeros(shape, dtype=self._stored, device=self.device) for shape in self._shapes]
        self._arena.map()
        arrays = [self._arena.tensor(index, shape, self._stored) for index, shape in enumerate(self._shapes)]
        return [array.zero_() for array in arrays]

    def _release_blocks(self) -> None:
        self._storage = None
        if self._arena is not None:
            self._arena.unmap()
