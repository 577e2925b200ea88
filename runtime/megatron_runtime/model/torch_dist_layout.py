"""How Megatron lays out the weights of a layer."""

from __future__ import annotations

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.tensor_names import TensorNames

Rows = tuple[range, ...]
"""Which rows of a tensor, in order."""


def layer_layout(config: ModelConfig, names: TensorNames) -> list[tuple[str, str, Rows, int]]:
    """Per tensor Megatron's name and Hugging Face's, less what comes before and after; which rows, out of how many.

    Norms stand under two names, since Transformer Engine keeps them with the matrix behind them.
    """
    hidden = _whole(config.hidden_size)
    head = _whole(config.head_dim)
    return [
        ("input_layernorm.", names.attention_norm, *hidden),
        ("self_attention.linear_qkv.layer_norm_", names.attention_norm, *hidden),
        *_queries_keys_values(config, names),
        ("self_attention.q_layernorm.", names.query_norm, *head),
        ("self_attention.k_layernorm.", names.key_norm, *head),
        ("self_attention.linear_proj.", names.attention_output, *hidden),
        ("pre_mlp_layernorm.", names.feed_forward_norm, *hidden),
        ("mlp.linear_fc1.layer_norm_", names.feed_forward_norm, *hidden),
        *_gate_and_up(config, names),
        ("mlp.linear_fc2.", names.down, *hidden),
    ]


def _whole(rows: int) -> tuple[Rows, int]:
    return (range(rows),), rows


def _queries_keys_values(config: ModelConfig, names: TensorNames) -> list[tuple[str, str, Rows, int]]:
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
    return [("self_attention.linear_qkv.", name, rows, total) for name, rows in zip(names.qkv, kinds, strict=True)]


def _gate_and_up(config: ModelConfig, names: TensorNames) -> list[tuple[str, str, Rows, int]]:
    """One matrix, the gate's rows first."""
    size = config.intermediate_size
    total = 2 * size if config.gated_feed_forward else size
    share = total // len(names.gate_up)
    return [
        ("mlp.linear_fc1.", name, (range(index * share, (index + 1) * share),), total)
        for index, name in enumerate(names.gate_up)
    ]
