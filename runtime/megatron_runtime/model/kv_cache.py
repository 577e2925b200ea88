"""The keys and values of every token in flight, in blocks of equal size."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_runtime.model.config import ModelConfig

LayerCache = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [num_blocks, kv heads, block_size_tokens, head_dim]."""


class KVCache:
    """A pool of ``num_blocks`` blocks, each with room for ``block_size_tokens`` tokens in every layer.

    Which request owns which block is the scheduler's business; a block's content is defined by what was written.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self.dtype = dtype
        self.device = torch.device(device)
        # Heads before tokens: what one head sees of a block is one stretch of memory.
        self._shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, block_size_tokens, config.head_dim)
        self._storage: Tensor | None = None
        self._offloaded: Tensor | None = None
        self.restore()

    @staticmethod
    def block_bytes(config: ModelConfig, block_size_tokens: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers, keys and values together."""
        return config.num_layers * 2 * block_size_tokens * config.num_kv_heads * config.head_dim * dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool while it is resident."""
        elements = 1
        for size in self._shape:
            elements *= size
        return elements * self.dtype.itemsize

    @property
    def is_resident(self) -> bool:
        """Whether the pool lies on its device, so that a forward pass can use it."""
        return self._storage is not None

    def layer(self, index: int) -> LayerCache:
        """Views of one layer's keys and values."""
        assert self._storage is not None, "the cache was released or offloaded"
        return self._storage[index, 0], self._storage[index, 1]

    def release(self) -> None:
        """Give the memory back; the contents are gone."""
        self._storage = None
        self._offloaded = None

    def offload(self) -> None:
        """Move the contents to host memory and give the device's memory back; on a CPU there is nothing to move."""
        if self._storage is not None:
            self._offloaded = self._storage.to("cpu")
            self._storage = None

    def restore(self) -> None:
        """Make the cache resident again: with its contents after `offload`, with zeros after `release`.

        Zeros and not garbage: a masked key still meets the softmax, and garbage may hold NaN.
        """
        if self._storage is not None:
            return
        if self._offloaded is not None:
            self._storage = self._offloaded.to(self.device)
            self._offloaded = None
        else:
            self._storage = torch.zeros(self._shape, dtype=self.dtype, device=self.device)
