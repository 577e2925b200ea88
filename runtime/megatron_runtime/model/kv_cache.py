"""The keys and values of every token in flight, in blocks of equal size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.host_memory import zeros

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
        # Heads before tokens: what one head sees of a block is one chunk of memory.
        self._shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, block_size_tokens, config.head_dim)
        self._storage: Tensor | None = None
        self._offloaded: tuple[Tensor, Tensor] | None = None
        """Blocks' numbers, and their contents as the storage has them."""
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

    def offload(self, kept: Sequence[int]) -> None:
        """Give the pool's memory back, and keep a copy of some blocks' contents in host memory.

        On a CPU that is the memory where the pool lay: it falls to what the kept blocks take.
        """
        if self._storage is None:
            return
        blocks = torch.tensor(kept, dtype=torch.int64)
        contents = torch.empty((*self._shape[:2], len(kept), *self._shape[3:]), dtype=self.dtype)
        for copy, layer in zip(contents, self._storage, strict=True):
            # Layer by layer, since gathering takes memory of the device, which may be full.
            copy.copy_(layer[:, blocks.to(self.device)])
        self._offloaded = blocks, contents
        self._storage = None

    def restore(self) -> None:
        """Make the cache resident again: with the kept contents after `offload`, all else being zeros.

        Zeros and not garbage: a masked key still meets the softmax, and garbage may hold NaN.
        """
        if self._storage is not None:
            return
        if self.device.type == "cpu":
            # Untouched: writing a gibibyte of zeros takes as long as loading a small model.
            self._storage = zeros(self._shape, self.dtype)
        else:
            self._storage = torch.zeros(self._shape, dtype=self.dtype, device=self.device)
        if self._offloaded is not None:
            blocks, contents = self._offloaded
            for layer, copy in zip(self._storage, contents, strict=True):
                layer[:, blocks.to(self.device)] = copy.to(self.device)
            self._offloaded = None
