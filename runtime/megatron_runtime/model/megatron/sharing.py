"""Decoders whose weights are those of a live GPTModel of Megatron Core: they share its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.decoder_layer import DecoderLayer
from megatron_runtime.model.experts import Experts
from megatron_runtime.model.layers import FeedForward
from megatron_runtime.model.megatron.gpt_config import model_config
from megatron_runtime.model.positions import Positions
from megatron_runtime.model.products import linear
from megatron_runtime.model.self_attention import SelfAttention

_TABLE = "embedding.word_embeddings.weight"
_NOT_WEIGHTS = ("_extra_state", "local_tokens_per_expert", "inv_freq")
"""Suffixes of entries of a state that are not weights."""
_NOT_SERVED = ("mtp.",)
"""Prefixes of parts that do not predict the next token."""


def is_megatron_model(model: object) -> bool:
    """Whether this is a GPTModel of Megatron Core, or a wrapper of one."""
    inner: Any = _unwrapped(model)
    return isinstance(inner, nn.Module) and all(hasattr(inner, name) for name in ("config", "decoder", "embedding"))


def is_megatron_state(tensors: Mapping[str, object]) -> bool:
    """Whether these are the named tensors of a GPTModel."""
    return _TABLE in tensors or f"module.{_TABLE}" in tensors


def share_model(model: nn.Module, vocab_size: int | None = None) -> Decoder:
    """A decoder that uses the weights of a live GPTModel in place.

    Changes of the weights in place change its results; cached prefixes must be invalidated then. Matrices keep their
    layout, so on a CPU the last bits of a result depend on the other requests of the batch.

    Args:
        model: The GPTModel, or a wrapper such as Float16Module or DistributedDataParallel.
        vocab_size: Tokens of the tokenizer; None: all rows of the table.

    Raises:
        ConfigurationError: The model has a feature that the decoder does not implement, or several ranks.
        CheckpointError: A tensor is missing, unknown, or has another shape; the message names it.
    """
    inner: Any = _unwrapped(model)
    tensors = dict(inner.named_parameters())
    tensors |= {name: buffer for name, buffer in inner.named_buffers() if name.endswith("expert_bias")}
    rows = len(tensors[_TABLE]) if _TABLE in tensors else 0
    config = model_config(inner, min(rows, vocab_size or rows))
    decoder = share_tensors(config, tensors)
    rotary = getattr(inner, "rotary_pos_emb", None)
    if rotary is not None:
        # Megatron's own frequencies, because their scaling depends on the release.
        factor = getattr(rotary, "seq_len_interpolation_factor", None) or 1.0
        decoder.positions.frequencies = rotary.inv_freq.detach().float().to(decoder.device) / factor
    return decoder


def share_tensors(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Decoder:
    """The same for the named tensors of a GPTModel, such as its ``state_dict()``, with a known configuration."""
    source = _Tensors(tensors)
    table = source.take(_TABLE)
    decoder = Decoder(config, dtype=table.dtype, device="meta")
    decoder.positions = Positions(config, table.dtype, table.device)
    decoder.is_shared = True
    assert decoder.embedding is not None
    assert decoder.head is not None
    source.fill(decoder.embedding, "table", _TABLE, rows=config.vocab_size)
    if decoder.embedding.learned_positions is not None:
        source.fill(decoder.embedding, "learned_positions", "embedding.position_embeddings.weight")
    if config.tie_word_embeddings:
        decoder.head.table = decoder.embedding.table
    else:
        source.fill(decoder.head, "table", "output_layer.weight", rows=config.vocab_size)
    source.fill_all(decoder.head.norm, "decoder.final_layernorm.")
    for number, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        _share_layer(layer, source, f"decoder.layers.{number}.")
    if unused := next(source.unused(), None):
        raise CheckpointError(f"the Megatron model: tensor {unused} is unknown to the decoder; remove its layer")
    decoder.prepare_kernels()
    return decoder.eval()


class _Tensors:
    """The tensors of a GPTModel by name. Each is used once."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = {
            name.removeprefix("module."): tensor.detach()
            for name, tensor in tensors.items()
            if isinstance(tensor, Tensor) and not name.endswith(_NOT_WEIGHTS)
        }
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, *names: str) -> Tensor:
        """The tensor with the first of these names that exists."""
        for name in names:
            if name in self._tensors:
                self._used.add(name)
                return self._tensors[name]
        raise CheckpointError(f"the Megatron model: tensor {' or '.join(names)} is missing; give all of them")

    def fill(self, module: nn.Module, attribute: str, *names: str, rows: int | None = None) -> None:
        """Replace a parameter of the module by the tensor with one of these names, or by its first rows."""
        place(module, attribute, self.take(*names)[:rows], names[0])

    def fill_all(self, module: nn.Module, *stems: str) -> None:
        """Replace all parameters of the module, such as weight and bias, by tensors of these names."""
        for kind, _ in list(module.named_parameters()):
            self.fill(module, kind, *(stem + kind for stem in stems))

    def unused(self) -> Iterator[str]:
        """Names of tensors that were not used."""
        return (name for name in self._tensors if name not in self._used and not name.startswith(_NOT_SERVED))


def place(module: nn.Module, attribute: str, tensor: Tensor, name: str) -> None:
    """Replace a parameter by a tensor; CheckpointError unless it has the same shape and type."""
    expected = getattr(module, attribute)
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        raise CheckpointError(
            f"the Megatron model: tensor {name} is {tensor.dtype} {list(tensor.shape)}, but the configuration expects "
            f"{expected.dtype} {list(expected.shape)}"
        )
    setattr(module, attribute, nn.Parameter(tensor, requires_grad=False))


class _ConvertingLinear(nn.Module):
    """A router's matrix with another data type than its logits, converted in every pass."""

    rows_together: int | None = None
    """As ``rows`` of `products.linear`."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """[T, in] to [T, out]."""
        return linear(inputs, self.weight.to(inputs.dtype), None, self.rows_together)


def _share_layer(layer: DecoderLayer, source: _Tensors, prefix: str) -> None:
    # Transformer Engine stores a norm with the matrix that follows it.
    attention, mlp = f"{prefix}self_attention.", f"{prefix}mlp."
    source.fill_all(layer.attention_norm, f"{prefix}input_layernorm.", f"{attention}linear_qkv.layer_norm_")
    source.fill_all(layer.feed_forward_norm, f"{prefix}pre_mlp_layernorm.", f"{mlp}linear_fc1.layer_norm_")
    assert isinstance(layer.attention, SelfAttention)
    _share_attention(layer.attention, source, attention)
    if isinstance(layer.feed_forward, Experts):
        _share_experts(layer.feed_forward, source, mlp)
    else:
        _share_feed_forward(layer.feed_forward, source, mlp)


def _share_attention(attention: SelfAttention, source: _Tensors, stem: str) -> None:
    source.fill_all(attention.qkv, f"{stem}linear_qkv.")
    source.fill_all(attention.output, f"{stem}linear_proj.")
    if attention.query_norm is not None and attention.key_norm is not None:
        source.fill_all(attention.query_norm, f"{stem}q_layernorm.")
        source.fill_all(attention.key_norm, f"{stem}k_layernorm.")
    attention.head_order = _head_order(*attention.heads[:2]).to(attention.qkv.weight.device)


def _head_order(query_heads: int, kv_heads: int) -> Tensor:
    """int64 [heads]: positions of query, key and value heads in Megatron's matrix, where they are grouped."""
    width = query_heads // kv_heads + 2
    groups = torch.arange(kv_heads * width).view(kv_heads, width)
    return torch.cat((groups[:, :-2].flatten(), groups[:, -2], groups[:, -1]))


def _share_feed_forward(network: FeedForward, source: _Tensors, stem: str) -> None:
    source.fill_all(network.gate_up, f"{stem}linear_fc1.")
    source.fill_all(network.down, f"{stem}linear_fc2.")


def _share_experts(experts: Experts, source: _Tensors, stem: str) -> None:
    router = source.take(f"{stem}router.weight")
    if router.dtype == experts.router.linear.weight.dtype:
        place(experts.router.linear, "weight", router, f"{stem}router.weight")
    else:
        experts.router.linear = _ConvertingLinear(router)  # type: ignore[assignment]
    if experts.router.selection_bias is not None:
        source.fill(experts.router, "selection_bias", f"{stem}router.expert_bias")
    if f"{stem}experts.weight1" in source:
        _share_grouped(experts, source, stem)
    else:
        for index, network in enumerate(experts.networks):
            assert isinstance(network, FeedForward)
            for ours, theirs in ((network.gate_up, "linear_fc1"), (network.down, "linear_fc2")):
                for kind, _ in list(ours.named_parameters()):
                    one = f"{stem}experts.local_experts.{index}.{theirs}.{kind}"
                    source.fill(ours, kind, one, f"{stem}experts.{theirs}.{kind}{index}")
    if experts.shared is not None:
        _share_feed_forward(experts.shared.network, source, f"{stem}shared_experts.")
        if experts.shared.gate is not None:
            source.fill(experts.shared.gate, "weight", f"{stem}shared_experts.gate_weight")


def _share_grouped(experts: Experts, source: _Tensors, stem: str) -> None:
    """Both matrices of all experts, concatenated in the layout [in, out] of Megatron's grouped product."""
    hidden = experts.router.linear.weight.shape[1]
    wide, narrow = source.take(f"{stem}experts.weight1"), source.take(f"{stem}experts.weight2")
    wide, narrow = wide.view(experts.count, hidden, -1), narrow.view(experts.count, -1, hidden)
    for index, network in enumerate(experts.networks):
        assert isinstance(network, FeedForward)
        place(network.gate_up, "weight", wide[index].t(), f"{stem}experts.weight1")
        place(network.down, "weight", narrow[index].t(), f"{stem}experts.weight2")


def _unwrapped(model: Any) -> Any:
    while (
        isinstance(model, nn.Module)
        and not hasattr(model, "embedding")
        and isinstance(getattr(model, "module", None), nn.Module)
    ):
        model = model.module
    return model
