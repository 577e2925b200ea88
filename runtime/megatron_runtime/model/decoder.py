"""One decoder for all families, configured by the checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_runtime.model import cpu_attention, row_kernels
from megatron_runtime.model.attention import plan_attention
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.decoder_layer import DecoderLayer
from megatron_runtime.model.destinations import layer_destinations, norm_destinations
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.norms import make_norm
from megatron_runtime.model.origin import Origin
from megatron_runtime.model.packed_linear import PackedLinear, can_pack, pack_linears
from megatron_runtime.model.positions import Positions
from megatron_runtime.model.tensor_names import tensor_names


class Decoder(nn.Module):
    """Token ids to next-token logits over a paged cache.

    The weights are uninitialized; `load_model` fills them through `destinations`.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        # Rounded to the weights' type, as in the training of the models that have one.
        self._embedding_multiplier = float(torch.tensor(config.embedding_multiplier, dtype=dtype))
        with torch.device(device):
            self.embedding = self._table(config.vocab_size)
            self.learned_positions = self._table(config.learned_positions) if config.learned_positions else None
            self.layers = nn.ModuleList(DecoderLayer(config, layer, dtype) for layer in range(config.num_layers))
            self.norm = make_norm(config, config.hidden_size, dtype)
            self.head = self.embedding if config.tie_word_embeddings else self._table(config.vocab_size)
        self._packed_head: PackedLinear | None = None
        self.origin: Origin | None = None
        """The files that the weights are in; None for those that were made in memory."""
        self.positions = Positions(config, dtype, device)

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embedding.device

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """Logits of the wanted rows, float32 [L, vocab]; the new tokens' keys and values are written to the cache."""
        plan = plan_attention(batch, kv_cache)
        rotations = self.positions(batch.positions)
        hidden = self._embed(batch)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotations[index], plan, kv_cache.layer(index))
        wanted = self.norm(hidden[batch.logit_rows])
        logits = functional.linear(wanted, self.head) if self._packed_head is None else self._packed_head(wanted)
        return self._finish(logits.float())

    def prepare(self) -> None:
        """Get ready to compute on this device, and put the weights into its matrix kernels' own order; after loading.

        Every matrix is held in that order alone, but for a head that is tied to the embedding: the embedding is looked
        up by rows, so that this one matrix is held twice.
        """
        if self.device.type == "cpu":
            cpu_attention.prepare(self.config.head_dim, self.dtype)
            row_kernels.prepare(self.dtype)
        if not can_pack(self.dtype, self.device):
            return
        pack_linears(self.layers)
        self._packed_head = PackedLinear(self.head)
        if not self.config.tie_word_embeddings:
            del self.head

    @property
    def is_packed(self) -> bool:
        """Whether `prepare` has put the weights into the kernels' order."""
        return self._packed_head is not None

    def become(self, other: Decoder) -> None:
        """Take over all that the other one is, which is not to be used any more; what was here is let go."""
        vars(self).clear()
        vars(self).update(vars(other))

    def copy_from(self, other: Decoder) -> None:
        """Copy the other one's weights to where this one's lie; neither is packed, and both have one configuration."""
        for ours, theirs in zip(self.parameters(), other.parameters(), strict=True):
            ours.copy_(theirs)
        for buffer, other_buffer in zip(self.buffers(), other.buffers(), strict=True):
            buffer.copy_(other_buffer)
        self.origin = other.origin

    def destinations(self) -> dict[str, Tensor]:
        """Where each tensor of a checkpoint goes: Hugging Face's name to a view into this decoder's weights.

        After `prepare` the matrices are copies, good for reading only.
        """
        names = tensor_names(self.config.architecture)
        named: dict[str, Tensor] = {f"{names.embedding}.weight": self.embedding}
        if self.learned_positions is not None:
            named[f"{names.learned_positions}.weight"] = self.learned_positions
        named |= norm_destinations(self.norm, names.final_norm)
        if not self.config.tie_word_embeddings:
            named[f"{names.head}.weight"] = self.head if self._packed_head is None else self._packed_head.weight
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            prefix = names.layer.format(index)
            named |= {prefix + name: view for name, view in layer_destinations(layer, names)}
        return named

    def _table(self, rows: int) -> nn.Parameter:
        return nn.Parameter(torch.empty((rows, self.config.hidden_size), dtype=self.dtype), requires_grad=False)

    def _embed(self, batch: ForwardBatch) -> Tensor:
        hidden = functional.embedding(batch.tokens, self.embedding)
        if self._embedding_multiplier != 1.0:
            hidden = hidden * self._embedding_multiplier
        if self.learned_positions is not None:
            hidden = hidden + functional.embedding(batch.positions, self.learned_positions)
        return hidden

    def _finish(self, logits: Tensor) -> Tensor:
        if self.config.logit_divisor != 1.0:
            logits = logits / self.config.logit_divisor
        if (cap := self.config.logit_soft_cap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits
