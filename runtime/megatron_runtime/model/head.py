"""From what the last layer gives to logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_runtime.model.embedding import vocabulary_table
from megatron_runtime.model.norms import make_norm
from megatron_runtime.model.packed_linear import PackedLinear
from megatron_runtime.model.shard import Shard
from megatron_runtime.parallel.ranks import Ranks


class Head(nn.Module):
    """The last norm, and a table of the vocabulary, of which each rank of a layer has some rows.

    Args:
        shard: What is here.
        dtype: Of the weights, which are uninitialized until a checkpoint fills them.
        ranks: Those that have the other rows.
        table: That of the embedding, where it is here and serves both; otherwise the head has one of its own.
    """

    def __init__(self, shard: Shard, dtype: torch.dtype, ranks: Ranks, table: nn.Parameter | None) -> None:
        super().__init__()
        self._config = shard.config
        self._widths = shard.vocabulary_widths
        self._ranks = ranks
        self._has_own_table = table is None
        self.norm = make_norm(shard.config, shard.config.hidden_size, dtype)
        self.table = vocabulary_table(shard, dtype) if table is None else table
        self._packed: PackedLinear | None = None

    @property
    def weight(self) -> Tensor:
        """The rows that are here, [tokens here, hidden]; a copy once they are packed."""
        return self.table if self._packed is None else self._packed.weight

    def forward(self, hidden: Tensor) -> Tensor | None:
        """[L, hidden] to logits, float32 [L, vocab]; None but on the first rank of the layer."""
        normalized = self.norm(hidden)
        logits = functional.linear(normalized, self.table) if self._packed is None else self._packed(normalized)
        return self._ranks.gather(self._finish(logits.float()), self._widths)

    def pack(self) -> None:
        """Put the table into the matrix kernels' order; that of the embedding stays, since it is looked up by rows."""
        self._packed = PackedLinear(self.table)
        if self._has_own_table:
            del self.table

    def _finish(self, logits: Tensor) -> Tensor:
        if self._config.logit_divisor != 1.0:
            logits = logits / self._config.logit_divisor
        if (cap := self._config.logit_soft_cap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits
