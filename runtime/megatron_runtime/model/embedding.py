"""From token ids to the input of the first layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.host_memory import empty_matrix
from megatron_runtime.model.kernels.row_kernels import has_gpu_row_kernels
from megatron_runtime.model.quantized.matrix import QuantizedMatrix
from megatron_runtime.model.shard import Shard
from megatron_runtime.parallel.ranks import Ranks


class Embedding(nn.Module):
    """A table of the vocabulary, whose rows are divided among the ranks of a layer; and one of learned positions, if
    any.

    The weights are uninitialized until a checkpoint fills them.
    """

    def __init__(self, shard: Shard, dtype: torch.dtype, ranks: Ranks) -> None:
        super().__init__()
        config = shard.config
        self._ranks = ranks
        self._tokens = shard.vocabulary
        self._is_whole = len(shard.vocabulary) == config.vocab_size
        # Rounded to the weights' dtype, as in the training of the models that have such a scale.
        self._multiplier = float(torch.tensor(config.embedding_multiplier, dtype=dtype, device="cpu"))
        self._dtype = dtype
        self.table = vocabulary_table(shard, dtype)
        self.quantized: QuantizedMatrix | None = None
        """Instead of ``table``."""
        self.learned_positions: nn.Parameter | None = None
        if config.learned_positions:
            self.learned_positions = empty_matrix(config.learned_positions, config.hidden_size, dtype)

    @property
    def weight(self) -> Tensor:
        """The rows on this rank, [tokens here, hidden]; a copy if they are quantized."""
        return self.table if self.quantized is None else self.quantized.whole(self._dtype)

    def keep_quantized(self, matrix: QuantizedMatrix) -> None:
        """Replace the table."""
        self.quantized = matrix
        del self.table

    def forward(self, batch: ForwardBatch) -> Tensor:
        """[T, hidden]."""
        if self.quantized is None and has_gpu_row_kernels(self.table):
            if self._is_whole:
                return self.look_up_on_gpu(batch)
            memory = self._ranks.memory_for_part((len(batch.tokens), self.table.shape[1]), self._dtype)
            hidden = self._ranks.sum(self.look_up_on_gpu(batch, memory))
        else:
            hidden = self._rows(batch.tokens) if self._is_whole else self._look_up(batch.tokens)
            if self._multiplier != 1.0:
                hidden = hidden * self._multiplier
        if self.learned_positions is not None:
            hidden = hidden + functional.embedding(batch.positions, self.learned_positions)
        return hidden

    def look_up_on_gpu(self, batch: ForwardBatch, output: Tensor | None = None) -> Tensor:
        """The rows of this rank with their multiplier, and zeros for the others; with learned positions if this rank
        has all rows. ``output``: memory for the result."""
        from megatron_runtime.gpu import rows  # Triton is not needed on other devices.

        learned = None
        if self._is_whole and self.learned_positions is not None:
            learned = self.learned_positions, batch.positions
        return rows.look_up(batch.tokens, self.table, self._tokens.start, self._multiplier, learned, output)

    def _look_up(self, tokens: Tensor) -> Tensor:
        """The rows of this rank, and zeros for the others. Exactly one rank has each row, so the sum is exact."""
        rows = tokens - self._tokens.start
        elsewhere = (rows < 0) | (rows >= len(self._tokens))
        found = self._rows(rows.masked_fill(elsewhere, 0))
        return self._ranks.sum(found.masked_fill(elsewhere[:, None], 0.0))

    def _rows(self, indices: Tensor) -> Tensor:
        if self.quantized is None:
            return functional.embedding(indices, self.table)
        return self.quantized.rows_of(indices, self._dtype)


def vocabulary_table(shard: Shard, dtype: torch.dtype) -> nn.Parameter:
    """Memory for this rank's rows of the embedding or the head, [tokens here, hidden]."""
    return empty_matrix(len(shard.vocabulary), shard.config.hidden_size, dtype)
