"""The input of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ForwardBatch:
    """A flat batch of T new tokens from R requests, prefill and decode mixed, without padding.

    Request ``r`` owns the rows ``query_starts[r]:query_starts[r + 1]``. Its keys and values are in the blocks
    ``block_tables[r]``; after this pass ``context_lengths[r]`` of their tokens are valid, the new ones last.
    """

    tokens: Tensor
    """int64 [T], token ids."""
    positions: Tensor
    """int64 [T], position of each token in its sequence."""
    slots: Tensor
    """int64 [T], ``block * block_size_tokens + offset``: the slot of each new token's key and value."""
    query_starts: Tensor
    """int32 [R + 1], prefix sums of the new tokens per request."""
    context_lengths: Tensor
    """int32 [R], tokens in the cache per request after this pass."""
    block_tables: Tensor
    """int32 [R, max blocks], rows padded with 0 past ``ceil(context_lengths / block_size_tokens)``."""
    logit_rows: Tensor
    """int64 [L], the rows of the batch whose logits are requested, ascending."""
