"""One decoder for the whole family, configured by the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_runtime.model.attention import AttentionPlan
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.layers import DecoderLayer, Linear, RMSNorm
from megatron_runtime.model.rotary import inverse_frequencies, rotation


class Decoder(nn.Module):
    """Token ids to next-token logits over a paged cache.

    The weights are uninitialized; `load_model` fills them through `destinations`.
    """

    rotary_frequencies: Tensor
    """float32 [head_dim / 2]; kept apart from the weights' type, since positions need the precision."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        with torch.device(device):
            shape = (config.vocab_size, config.hidden_size)
            self.embedding = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
            self.layers = nn.ModuleList(DecoderLayer(config, layer, dtype) for layer in range(config.num_layers))
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
            self.head = self.embedding
            if not config.tie_word_embeddings:
                self.head = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        # Worked out on the CPU: the same on every device, and the meta device would import a compiler for it.
        self.register_buffer("rotary_frequencies", inverse_frequencies(config).to(device), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embedding.device

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """Logits of the wanted rows, float32 [L, vocab]; the new tokens' keys and values are written to the cache."""
        plan = AttentionPlan(batch, kv_cache.block_size_tokens)
        rotary = rotation(batch.positions, self.rotary_frequencies, self.dtype)
        hidden = functional.embedding(batch.tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotary, plan, kv_cache.layer(index))
        wanted = self.norm(hidden[batch.logit_rows])
        return functional.linear(wanted, self.head).float()

    def destinations(self) -> dict[str, Tensor]:
        """Where each tensor of a checkpoint goes: Hugging Face's name to a view into this decoder's weights."""
        named: dict[str, Tensor] = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        if not self.config.tie_word_embeddings:
            named["lm_head.weight"] = self.head
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            named |= {f"model.layers.{index}.{name}": view for name, view in _layer_destinations(layer)}
        return named


def _layer_destinations(layer: DecoderLayer) -> Iterator[tuple[str, Tensor]]:
    attention, feed_forward = layer.attention, layer.feed_forward
    yield "input_layernorm.weight", layer.attention_norm.weight
    yield "post_attention_layernorm.weight", layer.feed_forward_norm.weight
    if attention.query_norm is not None and attention.key_norm is not None:
        yield "self_attn.q_norm.weight", attention.query_norm.weight
        yield "self_attn.k_norm.weight", attention.key_norm.weight
    head_rows = [heads * attention.head_dim for heads in attention.heads]
    yield from _parts(attention.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), head_rows)
    yield from _parts(attention.output, ("self_attn.o_proj",))
    yield from _parts(feed_forward.gate_up, ("mlp.gate_proj", "mlp.up_proj"))
    yield from _parts(feed_forward.down, ("mlp.down_proj",))


def _parts(linear: Linear, names: tuple[str, ...], rows: list[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The named pieces of a fused matrix, of ``rows`` each or of equal size, and of its bias if it has one."""
    for kind, tensor in (("weight", linear.weight), ("bias", linear.bias)):
        if tensor is not None:
            pieces = torch.split(tensor, rows or [len(tensor) // len(names)] * len(names))
            yield from ((f"{name}.{kind}", piece) for name, piece in zip(names, pieces, strict=True))
