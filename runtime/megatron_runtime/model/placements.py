"""The destination of each tensor of a checkpoint in a layer's weights, and which part of it is stored there."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron_runtime.model.decoder_layer import Attention, DecoderLayer, SingleMixerLayer
from megatron_runtime.model.experts import Experts
from megatron_runtime.model.formats.tensor_names import TensorNames
from megatron_runtime.model.formats.weight_source import WeightSource, row_pieces
from megatron_runtime.model.gated_delta_net import GatedDeltaNet
from megatron_runtime.model.latent_attention import MLASelfAttention
from megatron_runtime.model.layers import FeedForward, Linear
from megatron_runtime.model.mamba import Mamba2
from megatron_runtime.model.self_attention import SelfAttention
from megatron_runtime.model.shard import Shard


@dataclass(frozen=True)
class Placement:
    """The destination of a stored tensor, or of the part of it that a rank has."""

    view: Tensor
    """Into the weights."""
    stored: tuple[range, ...]
    """The chunks of the tensor's dimension ``dim`` that fill the view, in order; the other dimension is whole."""
    dim: int = 0
    matrix_of: nn.Module | None = None
    """The module whose matrix ``view`` is, or the next rows of it, and that can have a quantized matrix instead."""

    @property
    def elements(self) -> int:
        """Number of weights."""
        return self.view.numel()

    @property
    def numbers(self) -> int:
        """Number of values that `count_not_finite` checks."""
        return self.elements

    @property
    def type_name(self) -> str:
        """The type of the weights in memory, for errors."""
        return str(self.view.dtype).removeprefix("torch.")

    def fill(self, source: WeightSource, name: str) -> Iterator[int]:
        """Copy the tensor; yields the number of weights of each chunk."""
        for part, begin in self.pieces():
            yield from source.read(name, part, begin)

    def count_not_finite(self) -> int:
        """The number of weights that are NaN or infinite. By chunks, because the result for each needs memory too."""
        view = self.view
        return sum(int((~view[part].isfinite()).sum()) for part in row_pieces(tuple(view.shape)))

    def pieces(self) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """Parts of the view, with the start of the corresponding part of the tensor."""
        for part, chunk in zip(
            torch.split(self.view, [len(each) for each in self.stored], self.dim), self.stored, strict=True
        ):
            yield part, tuple(chunk.start if dim == self.dim else 0 for dim in range(self.view.dim()))


Placements = Iterator[tuple[str, Placement]]
"""By names without the layer's prefix."""


def whole(view: Tensor) -> Placement:
    """All of a tensor."""
    return Placement(view, (range(len(view)),))


def layer_placements(layer: DecoderLayer | SingleMixerLayer, names: TensorNames, shard: Shard) -> Placements:
    """Every tensor of one layer that has a part in ``shard``."""
    if isinstance(layer, SingleMixerLayer):
        yield from norm_placements(layer.norm, names.mixer_norm).items()
        if isinstance(layer.mixer, FeedForward | Experts):
            yield from _network(layer.mixer, names, shard)
        else:
            yield from _attention(layer.mixer, names, shard)
        return
    # Not a mapping by name, because some names have two meanings, of which a family uses one.
    norms = [
        (names.attention_norm, layer.attention_norm),
        (names.attention_output_norm, layer.attention_output_norm),
        (names.feed_forward_norm, layer.feed_forward_norm),
        (names.feed_forward_output_norm, layer.feed_forward_output_norm),
    ]
    for name, norm in norms:
        yield from norm_placements(norm, name).items()
    yield from _attention(layer.attention, names, shard)
    yield from _network(layer.feed_forward, names, shard)


def _attention(attention: Attention, names: TensorNames, shard: Shard) -> Placements:
    if isinstance(attention, MLASelfAttention):
        yield from _latent_attention(attention, names, shard)
    elif isinstance(attention, GatedDeltaNet | Mamba2):
        yield from _recurrence(attention, names, shard)
    else:
        yield from _grouped_query_attention(attention, names, shard)


def _network(network: FeedForward | Experts, names: TensorNames, shard: Shard) -> Placements:
    if isinstance(network, Experts):
        yield from _experts(network, names, shard)
    else:
        channels = _Part(shard.channels, shard.config.intermediate_size)
        yield from _feed_forward(network, names.gate_up, names.down, names, channels)


def norm_placements(norm: nn.Module, name: str, channels: range | None = None) -> dict[str, Placement]:
    """The weight of a norm, and its bias if it has one, for ``channels``; nothing without a norm."""
    return {
        f"{name}.{kind}": whole(parameter) if channels is None else Placement(parameter, (channels,))
        for kind, parameter in norm.named_parameters()
    }


@dataclass(frozen=True)
class _Part:
    """Some rows or columns of a stored matrix with ``total`` of them."""

    chunk: range
    total: int

    def shift(self, by: int) -> range:
        return range(self.chunk.start + by, self.chunk.stop + by)


def _grouped_query_attention(attention: SelfAttention, names: TensorNames, shard: Shard) -> Placements:
    size, config = attention.head_dim, shard.config
    queries = _heads(shard.query_heads, config.num_attention_heads, size)
    keys = _heads(shard.kv_heads, config.num_kv_heads, size)
    if attention.query_norm is not None and attention.key_norm is not None:
        of_queries: range | None = None
        of_keys: range | None = None
        if attention.norms_whole_projection:
            of_queries, of_keys = queries.chunk, keys.chunk
        elif config.query_key_norm == "each_head":
            of_queries, of_keys = shard.query_heads, shard.kv_heads
        yield from norm_placements(attention.query_norm, names.query_norm, of_queries).items()
        yield from norm_placements(attention.key_norm, names.key_norm, of_keys).items()
    if attention.sinks is not None:
        yield names.attention_sinks, Placement(attention.sinks, (shard.query_heads,))
    projected = _heads(shard.query_heads, config.num_attention_heads, 2 * size) if attention.has_gate else queries
    yield from _rows(attention.qkv, names.qkv, [projected, keys, keys], names)
    yield from _columns(attention.output, names.attention_output, queries, names)


def _latent_attention(attention: MLASelfAttention, names: TensorNames, shard: Shard) -> Placements:
    latent, heads, total = attention.latent, shard.query_heads, shard.config.num_attention_heads
    queries, stored, parts = names.qkv[0], [names.kv_down], [_all(latent.kv_lora_rank + latent.qk_rope_head_dim)]
    if latent.q_lora_rank is not None:
        assert attention.query_down_norm is not None
        queries, stored, parts = names.query_up, [names.query_down, *stored], [_all(latent.q_lora_rank), *parts]
        yield from norm_placements(attention.query_down_norm, names.query_down_norm).items()
    yield from _rows(attention.down, stored, parts, names)
    yield from _rows(attention.query_up, [queries], [_heads(heads, total, attention.head_dim)], names)
    yield from norm_placements(attention.kv_down_norm, names.kv_down_norm).items()
    rows = _heads(heads, total, latent.qk_nope_head_dim + latent.v_head_dim)
    yield f"{names.kv_up}.weight", _matrix(attention.kv_up, (rows.chunk,), 0, names, None)
    yield from _columns(attention.output, names.attention_output, _heads(heads, total, latent.v_head_dim), names)


def _recurrence(layer: GatedDeltaNet | Mamba2, names: TensorNames, shard: Shard) -> Placements:
    sizes = shard.config.recurrent
    assert sizes is not None
    key_heads, value_heads = shard.recurrent_key_heads(sizes), shard.recurrent_value_heads(sizes)
    keys = _heads(key_heads, sizes.key_heads, sizes.key_dim)
    values = _heads(value_heads, sizes.value_heads, sizes.value_dim)
    yield names.log_rates, Placement(layer.log_rates, (value_heads,))
    yield names.step_biases, Placement(layer.step_biases, (value_heads,))
    mixed = [values, keys, keys] if isinstance(layer, Mamba2) else [keys, keys, values]
    channels = _one_behind_the_other(mixed)
    yield f"{names.convolution}.weight", Placement(layer.convolution.t()[:, None], channels)
    if isinstance(layer, Mamba2):
        if layer.convolution_bias is not None:
            yield f"{names.convolution}.bias", Placement(layer.convolution_bias, channels)
        yield names.skips, Placement(layer.skips, (value_heads,))
        yield f"{names.recurrent_norm}.weight", Placement(layer.norm, (values.chunk,))
        steps = _heads(value_heads, sizes.value_heads, 1)
        yield from _rows(layer.inputs, names.recurrent_inputs, [values, *mixed, steps], names)
    else:
        yield f"{names.recurrent_norm}.weight", whole(layer.norm)
        strengths = steps = _heads(value_heads, sizes.value_heads, 1)
        for linear, stored, groups in (
            (layer.inputs, names.recurrent_inputs, [mixed, [values]]),
            (layer.gates, names.recurrent_gates, [[strengths], [steps]]),
        ):
            if len(stored) == len(groups):
                chunks = [_one_behind_the_other(parts) for parts in groups]
            else:
                chunks = [_by_key_head(itertools.chain.from_iterable(groups), key_heads, sizes.key_heads)]
            yield from _chunks_of_rows(linear, stored, chunks, names)
    yield from _columns(layer.output, names.recurrent_output, values, names)


def _all(total: int) -> _Part:
    return _Part(range(total), total)


def _heads(heads: range, total: int, size: int) -> _Part:
    return _Part(range(heads.start * size, heads.stop * size), total * size)


def _feed_forward(
    network: FeedForward, gate_up: Sequence[str], down: str, names: TensorNames, channels: _Part
) -> Placements:
    yield from _rows(network.gate_up, gate_up, [channels] * (2 if network.gated else 1), names)
    yield from _columns(network.down, down, channels, names)


def _experts(experts: Experts, names: TensorNames, shard: Shard) -> Placements:
    config = shard.config.experts
    assert config is not None
    channels = _Part(shard.expert_channels(config), config.intermediate_size)
    router = _Part(range(config.count), config.count)
    for name, placement in _rows(experts.router.linear, [names.router], [router], names):
        yield name, replace(placement, matrix_of=None)  # rounded inputs would choose other experts
    if experts.router.selection_bias is not None:
        yield names.selection_bias, whole(experts.router.selection_bias)
    for index, network in zip(experts.here, experts.networks, strict=True):
        assert isinstance(network, FeedForward)
        prefix = names.expert.format(index)
        gate_up = [prefix + name for name in names.expert_gate_up]
        yield from _feed_forward(network, gate_up, prefix + names.expert_down, names, channels)
    if experts.shared is not None:
        channels = _Part(shard.shared_expert_channels(config), config.shared_intermediate_size)
        yield from _feed_forward(experts.shared.network, names.shared_gate_up, names.shared_down, names, channels)
        if experts.shared.gate is not None:
            yield from _rows(experts.shared.gate, [names.shared_expert_gate], [_Part(range(1), 1)], names)


def _rows(linear: Linear, stored: Sequence[str], parts: Sequence[_Part], names: TensorNames) -> Placements:
    """The rows of a fused matrix, and of its bias if it has one: from a tensor for each of ``parts``, or from one for
    all.
    """
    if len(stored) == len(parts):
        chunks: list[tuple[range, ...]] = [(part.chunk,) for part in parts]
    else:
        chunks = [_one_behind_the_other(parts)]
    yield from _chunks_of_rows(linear, stored, chunks, names)


def _chunks_of_rows(
    linear: Linear, stored: Sequence[str], chunks: Sequence[tuple[range, ...]], names: TensorNames
) -> Placements:
    """The same, from these chunks of each tensor."""
    sizes = [sum(map(len, each)) for each in chunks]
    for name, weight, each in zip(stored, torch.split(linear.weight, sizes), chunks, strict=True):
        yield f"{name}.weight", _matrix(weight, each, 0, names, linear)
    if linear.bias is not None:
        for name, bias, each in zip(stored, torch.split(linear.bias, sizes), chunks, strict=True):
            yield f"{name}.bias", Placement(bias, each)


def _one_behind_the_other(parts: Sequence[_Part]) -> tuple[range, ...]:
    """The chunks of a tensor that has the rows of each of ``parts``."""
    before = [sum(part.total for part in parts[:index]) for index in range(len(parts))]
    return tuple(part.shift(by) for part, by in zip(parts, before, strict=True))


def _by_key_head(parts: Iterable[_Part], here: range, total: int) -> tuple[range, ...]:
    """The chunks of a tensor that has the rows of each of ``parts`` for one key head after another; for those ``here``,
    one part after another.
    """
    sizes = [part.total // total for part in parts]
    before = [0, *itertools.accumulate(sizes)]
    return tuple(
        range(head * before[-1] + start, head * before[-1] + end)
        for start, end in itertools.pairwise(before)
        for head in here
    )


def _columns(linear: Linear, stored: str, part: _Part, names: TensorNames) -> Placements:
    yield f"{stored}.weight", _matrix(linear.weight, (part.chunk,), 1, names, linear)
    if linear.bias is not None:
        yield f"{stored}.bias", whole(linear.bias)


def _matrix(
    weight: Tensor, chunks: tuple[range, ...], dim: int, names: TensorNames, owner: nn.Module | None
) -> Placement:
    if names.transposed:
        return Placement(weight.t(), chunks, 1 - dim)
    return Placement(weight, chunks, dim, owner)
