"""The fields of a ``config.json`` that describe experts, which several families share."""

from __future__ import annotations

from typing import Any

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import ExpertsConfig, RoutingConfig
from megatron_runtime.model.formats.config_fields import MISSING, ConfigFields


def num_experts(fields: ConfigFields) -> int:
    """The number of experts, whose field has two spellings."""
    count: int = fields.get("num_experts", fields.get("num_local_experts", None, int), int)
    return count if count is not None else fields.get("num_experts", MISSING, int)


def deepseek_v2_experts(fields: ConfigFields, layers: int) -> ExpertsConfig:
    """Softmax scores; ``topk_method`` limits the selection to groups or not (DeepSeek-AI, DeepSeek-V2).

    Args:
        fields: Of the ``config.json``.
        layers: Number of layers of the model.
    """
    method = fields.get("topk_method", "greedy", str)
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(
            f"{fields.path}: topk_method is {method!r}, the known ones are greedy and group_limited_greedy. "
            "Choose another model"
        )
    fields.refuse("scoring_func", "softmax")
    fields.refuse("norm_topk_prob", False)
    is_limited = method == "group_limited_greedy"
    routing = RoutingConfig(
        weight_multiplier=fields.positive("routed_scaling_factor", 1.0),
        groups=fields.get("n_group", MISSING, int) if is_limited else 1,
        groups_per_token=fields.get("topk_group", MISSING, int) if is_limited else 1,
        in_float32=True,
    )
    return _deepseek_experts(fields, layers, routing)


def deepseek_v3_experts(fields: ConfigFields, layers: int) -> ExpertsConfig:
    """Sigmoid scores, a bias for the selection, and groups ranked by their two best (DeepSeek-AI, DeepSeek-V3).

    Args:
        fields: Of the ``config.json``.
        layers: Number of layers of the model.
    """
    fields.refuse("scoring_func", "sigmoid")
    fields.refuse("topk_method", "noaux_tc")
    return _deepseek_experts(fields, layers, deepseek_v3_routing(fields))


def deepseek_v3_routing(fields: ConfigFields, *, multiplier: Any = MISSING, groups: Any = MISSING) -> RoutingConfig:
    """The router of DeepSeek-V3; ``multiplier`` and ``groups`` are defaults."""
    return RoutingConfig(
        scores="sigmoid",
        normalize_weights=fields.get("norm_topk_prob", True, bool),
        weight_multiplier=fields.positive("routed_scaling_factor", multiplier),
        has_selection_bias=True,
        groups=fields.get("n_group", groups, int),
        groups_per_token=fields.get("topk_group", groups, int),
        group_scores="top_2_sum",
        in_float32=True,
    )


def _deepseek_experts(fields: ConfigFields, layers: int, routing: RoutingConfig) -> ExpertsConfig:
    fields.refuse("moe_layer_freq", 1)
    intermediate_size = fields.get("moe_intermediate_size", MISSING, int)
    return ExpertsConfig(
        count=fields.get("n_routed_experts", MISSING, int),
        per_token=fields.get("num_experts_per_tok", MISSING, int),
        intermediate_size=intermediate_size,
        routing=routing,
        dense_layers=frozenset(range(min(fields.get("first_k_dense_replace", 0, int), layers))),
        shared_intermediate_size=fields.get("n_shared_experts", 0, int) * intermediate_size,
    )
