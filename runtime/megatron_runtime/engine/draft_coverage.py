"""Which tokens have keys and values of the draft model."""

from __future__ import annotations

import numpy as np

from megatron_runtime.engine.scheduling.sequence import Sequence


class DraftCoverage:
    """The number of leading places of each KV block that have keys and values of the draft model.

    Blocks may be shared, and may move from one sequence to another: a count applies to the tokens that the served model
    computed last in these places, so it has to know of all of them.

    Args:
        num_blocks: Of the KV cache.
        block_size_tokens: Tokens of a block.
    """

    def __init__(self, num_blocks: int, block_size_tokens: int) -> None:
        self._size = block_size_tokens
        self._counts = np.zeros(num_blocks, np.int64)

    def replaced(self, sequence: Sequence, start: int, end: int) -> None:
        """The places of these tokens get other tokens."""
        for block in range(start // self._size, self._blocks_for(end)):
            number = sequence.blocks[block]
            self._counts[number] = min(self._counts[number], max(start - block * self._size, 0))

    def computed(self, sequence: Sequence, start: int, end: int) -> None:
        """The draft model has computed these tokens, and all before them."""
        for block in range(start // self._size, self._blocks_for(end)):
            self._counts[sequence.blocks[block]] = min(end - block * self._size, self._size)

    def end(self, sequence: Sequence, limit: int) -> int:
        """Number of leading tokens that the draft model has computed, of the first ``limit``."""
        counts = self._counts[sequence.blocks[: self._blocks_for(limit)]]
        (short,) = np.nonzero(counts < self._size)
        return min(limit, int(short[0] * self._size + counts[short[0]])) if len(short) else limit

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._size)
