"""Megatron's layout of the weights of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_runtime.model.config import ExpertsConfig, LatentAttentionConfig, ModelConfig
from megatron_runtime.model.formats.tensor_names import TensorNames

Rows = tuple[range, ...]
"""Which rows of a tensor, in order."""


@dataclass(frozen=True)
class Piece:
    """Some of the ``total`` rows of a tensor that Megatron stores under one of the names built from this."""

    stem: str
    """The part of the name before ``weight`` or ``bias``; braces may stand for a number."""
    rows: Rows
    total: int
    expert: int | None = None
    ending: str = ""
    """The part of the name after ``weight`` or ``bias``."""


@dataclass(frozen=True)
class Entry:
    """One of Hugging Face's tensors, without the layer's prefix and the kind, and its pieces in order in each known
    layout.
    """

    name: str
    ways: tuple[tuple[Piece, ...], ...]
    joint: str = "."
    """The part between the name and the kind."""


def whole(stem: str, name: str, rows: int) -> Entry:
    """A tensor that is the same in both formats."""
    return Entry(name, ((Piece(stem, (range(rows),), rows),),))


def layer_layout(config: ModelConfig, names: TensorNames, experts: ExpertsConfig | None) -> Iterator[Entry]:
    """The tensors of a layer, with ``experts`` or without; the router, which shows their number, before the experts.

    Norms have two names, because Transformer Engine stores them with the following matrix. Layers without it use its
    names too, even before experts, where there is no such matrix.
    """
    hidden = config.hidden_size
    yield whole("input_layernorm.", names.attention_norm, hidden)
    if config.latent_attention is None:
        yield whole("self_attention.linear_qkv.layer_norm_", names.attention_norm, hidden)
        yield from _queries_keys_values(config, names)
        yield whole("self_attention.q_layernorm.", names.query_norm, config.head_dim)
        yield whole("self_attention.k_layernorm.", names.key_norm, config.head_dim)
    else:
        yield from _latent_attention(config, config.latent_attention, names)
    yield whole("self_attention.linear_proj.", names.attention_output, hidden)
    yield whole("pre_mlp_layernorm.", names.feed_forward_norm, hidden)
    yield whole("mlp.linear_fc1.layer_norm_", names.feed_forward_norm, hidden)
    if experts is None:
        yield from _widening("mlp.", names.gate_up, config.intermediate_size, gated=config.gated_feed_forward)
        yield whole("mlp.linear_fc2.", names.down, hidden)
        return
    yield whole("mlp.router.", names.router, experts.count)
    for index in range(experts.count):
        yield from _expert(index, experts, names, hidden)
    if experts.routing.has_selection_bias:
        bias = whole("mlp.router.expert_", names.selection_bias.removesuffix("_bias"), experts.count)
        yield replace(bias, joint="_")
    if experts.shared_intermediate_size:
        stem = "mlp.shared_experts."
        yield from _widening(stem, names.shared_gate_up, experts.shared_intermediate_size, gated=True)
        yield whole(f"{stem}linear_fc2.", names.shared_down, hidden)
        yield whole(f"{stem}gate_", names.shared_expert_gate, 1)


def _queries_keys_values(config: ModelConfig, names: TensorNames) -> list[Entry]:
    """One matrix, in which each group holds the queries that share a key head, then the key, then the value."""
    queries, size = config.queries_per_kv_head * config.head_dim, config.head_dim
    group = queries + 2 * size
    total = config.num_kv_heads * group
    starts = range(0, total, group)
    kinds: list[Rows] = [
        tuple(range(start, start + queries) for start in starts),
        tuple(range(start + queries, start + queries + size) for start in starts),
        tuple(range(start + queries + size, start + group) for start in starts),
    ]
    if len(names.qkv) == 1:
        kinds = [sum(kinds, ())]
    stem = "self_attention.linear_qkv."
    return [Entry(name, ((Piece(stem, rows, total),),)) for name, rows in zip(names.qkv, kinds, strict=True)]


def _latent_attention(config: ModelConfig, latent: LatentAttentionConfig, names: TensorNames) -> Iterator[Entry]:
    """Both formats have the same matrices, with their rows in the same order."""
    heads, rank = config.num_attention_heads, latent.kv_lora_rank
    if latent.q_lora_rank is None:
        yield whole("self_attention.linear_q_proj.", names.qkv[0], heads * config.head_dim)
    else:
        yield whole("self_attention.linear_q_down_proj.", names.query_down, latent.q_lora_rank)
        yield whole("self_attention.q_layernorm.", names.query_down_norm, latent.q_lora_rank)
        yield whole("self_attention.linear_q_up_proj.layer_norm_", names.query_down_norm, latent.q_lora_rank)
        yield whole("self_attention.linear_q_up_proj.", names.query_up, heads * config.head_dim)
    yield whole("self_attention.linear_kv_down_proj.", names.kv_down, rank + latent.qk_rope_head_dim)
    yield whole("self_attention.kv_layernorm.", names.kv_down_norm, rank)
    yield whole("self_attention.linear_kv_up_proj.layer_norm_", names.kv_down_norm, rank)
    yield whole("self_attention.linear_kv_up_proj.", names.kv_up, heads * (latent.qk_nope_head_dim + latent.v_head_dim))


def _expert(index: int, experts: ExpertsConfig, names: TensorNames, hidden: int) -> Iterator[Entry]:
    """Experts are stored in the same way for sequential and grouped execution: a tensor each, or along a dimension of
    one.
    """
    prefix, stem = names.expert.format(index), "mlp.experts.experts.{}"
    gate_up = tuple(prefix + name for name in names.expert_gate_up)
    yield from _widening(stem, gate_up, experts.intermediate_size, gated=True, expert=index)
    down = Piece(f"{stem}linear_fc2.", (range(hidden),), hidden, index)
    yield Entry(prefix + names.expert_down, ((down,),))


def _widening(
    stem: str, names: tuple[str, ...], size: int, *, gated: bool, expert: int | None = None
) -> Iterator[Entry]:
    """One matrix, with the gate's rows first; or, in newer versions with gates, gate and up separately, as w and v."""
    stem += "linear_fc1."
    if not gated:
        yield whole(stem, names[0], size)
        return
    together = [Piece(stem, (range(half * size, (half + 1) * size),), 2 * size, expert) for half in range(2)]
    apart = [Piece(stem, (range(size),), size, expert, ending) for ending in ("_w", "_v")]
    if len(names) == 1:
        yield Entry(names[0], (tuple(together), tuple(apart)))
        return
    for name, one, other in zip(names, together, apart, strict=True):
        yield Entry(name, ((one,), (other,)))
