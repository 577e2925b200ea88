"""Which part of a layer's weights each tensor of a checkpoint fills."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from megatron_runtime.model.decoder_layer import DecoderLayer
from megatron_runtime.model.experts import Experts
from megatron_runtime.model.layers import FeedForward, Linear, SelfAttention
from megatron_runtime.model.tensor_names import TensorNames

Destinations = Iterator[tuple[str, Tensor]]
"""Names without the layer's prefix, and views."""


def layer_destinations(layer: DecoderLayer, names: TensorNames) -> Destinations:
    """Every tensor of one layer."""
    # No mapping by name: some names serve two places, of which a family has one.
    norms = [
        (names.attention_norm, layer.attention_norm),
        (names.attention_output_norm, layer.attention_output_norm),
        (names.feed_forward_norm, layer.feed_forward_norm),
        (names.feed_forward_output_norm, layer.feed_forward_output_norm),
    ]
    for name, norm in norms:
        yield from norm_destinations(norm, name).items()
    yield from _attention(layer.attention, names)
    if isinstance(layer.feed_forward, Experts):
        yield from _experts(layer.feed_forward, names)
    else:
        yield from _feed_forward(layer.feed_forward, names.gate_up, names.down, names)


def norm_destinations(norm: nn.Module, name: str) -> dict[str, Tensor]:
    """The weight of a norm, and its bias if it has one; nothing where no norm is."""
    return {f"{name}.{kind}": parameter for kind, parameter in norm.named_parameters()}


def _attention(attention: SelfAttention, names: TensorNames) -> Destinations:
    if attention.query_norm is not None and attention.key_norm is not None:
        yield from norm_destinations(attention.query_norm, names.query_norm).items()
        yield from norm_destinations(attention.key_norm, names.key_norm).items()
    head_rows = [heads * attention.head_dim for heads in attention.heads]
    rows = head_rows if len(names.qkv) > 1 else [sum(head_rows)]
    yield from _parts(attention.qkv, names.qkv, rows, names)
    yield from _whole(attention.output, names.attention_output, names)


def _feed_forward(network: FeedForward, gate_up: Sequence[str], down: str, names: TensorNames) -> Destinations:
    rows = len(network.gate_up.weight) // len(gate_up)
    yield from _parts(network.gate_up, gate_up, [rows] * len(gate_up), names)
    yield from _whole(network.down, down, names)


def _experts(experts: Experts, names: TensorNames) -> Destinations:
    yield from _whole(experts.router, names.router, names)
    for index, network in enumerate(experts.networks):
        assert isinstance(network, FeedForward)
        prefix = names.expert.format(index)
        gate_up = [prefix + name for name in names.expert_gate_up]
        yield from _feed_forward(network, gate_up, prefix + names.expert_down, names)


def _whole(linear: Linear, name: str, names: TensorNames) -> Destinations:
    return _parts(linear, [name], [len(linear.weight)], names)


def _parts(linear: Linear, pieces: Sequence[str], rows: Sequence[int], names: TensorNames) -> Destinations:
    """The named pieces of a fused matrix, of ``rows`` each, and of its bias if it has one."""
    for name, weight in zip(pieces, torch.split(linear.weight, list(rows)), strict=True):
        yield f"{name}.weight", weight.t() if names.transposed else weight
    if linear.bias is not None:
        yield from zip([f"{name}.bias" for name in pieces], torch.split(linear.bias, list(rows)), strict=True)
