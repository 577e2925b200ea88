"""From the output of the last norm to logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_runtime.model.embedding import vocabulary_table
from megatron_runtime.model.norms import make_norm
from megatron_runtime.model.packed_linear import PackedLinear, PanelLinear, pack_linear
from megatron_runtime.model.products import linear
from megatron_runtime.model.quantized.linear import QuantizedLinear
from megatron_runtime.model.quantized.matrix import QuantizedMatrix
from megatron_runtime.model.shard import Shard
from megatron_runtime.parallel.ranks import Ranks


class Head(nn.Module):
    """The last norm, which the last layer computes with its sum, and a table of the vocabulary, whose rows are divided
    among the ranks of a layer.

    Args:
        shard: The part on this rank.
        dtype: Of the weights, which are uninitialized until a checkpoint fills them.
        ranks: The ranks with the other rows.
        table: That of the embedding, if it is on this rank and serves both; otherwise the head has a separate one.
    """

    rows_together: int | None = None
    """As ``rows`` of `products.linear`."""

    def __init__(self, shard: Shard, dtype: torch.dtype, ranks: Ranks, table: nn.Parameter | None) -> None:
        super().__init__()
        self._config = shard.config
        self._widths = shard.vocabulary_widths
        self._ranks = ranks
        self._has_own_table = table is None
        self.norm = make_norm(shard.config, shard.config.hidden_size, dtype)
        self.table = vocabulary_table(shard, dtype) if table is None else table
        self._dtype = dtype
        self._packed: PackedLinear | PanelLinear | QuantizedLinear | None = None

    @property
    def weight(self) -> Tensor:
        """The rows on this rank, [tokens here, hidden]; a copy once they are packed."""
        return self.table if self._packed is None else self._packed.weight

    def forward(self, normed: Tensor) -> Tensor | None:
        """[L, hidden] after the last norm to logits, float32 [L, vocab]; None on ranks of the layer that do not get
        them.
        """
        logits = linear(normed, self.table, None, self.rows_together) if self._packed is None else self._packed(normed)
        gathered = self._ranks.gather(logits, self._widths)
        return None if gathered is None else self._finish(gathered)

    def pack(self) -> None:
        """Pack the table for the matrix kernels, unless it is quantized. A table shared with the embedding is kept,
        because it is looked up by rows.
        """
        if self._packed is not None:
            return
        self._packed = pack_linear(self.table)
        if self._has_own_table:
            del self.table

    def keep_quantized(self, matrix: QuantizedMatrix) -> None:
        """Replace the table; the embedding may have the same matrix."""
        self._packed = QuantizedLinear([matrix], None, self._dtype)
        del self.table

    def _finish(self, logits: Tensor) -> Tensor:
        if self._config.logit_divisor != 1.0:
            logits = logits / self._config.logit_divisor
        if (cap := self._config.logit_soft_cap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits
