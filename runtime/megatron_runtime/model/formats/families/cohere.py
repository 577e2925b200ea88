"""Command R, Command A and their relatives of Cohere."""

from __future__ import annotations

from dataclasses import replace

from megatron_runtime.model.config import ModelConfig, layers_without_window
from megatron_runtime.model.formats.config_fields import ConfigFields
from megatron_runtime.model.formats.families.llama import llama, windows_by_pattern


def cohere(fields: ConfigFields, *, rope_theta: float = 5e5) -> ModelConfig:
    """Attention beside feed-forward, LayerNorm without bias, adjacent channels rotated, and a factor of the logits."""
    for name in ("use_parallel_block", "use_gated_activation"):
        fields.refuse(name, True)
    config = llama(fields, tied=True, rope_theta=rope_theta)
    return replace(
        config,
        mlp_bias=False,
        norm="layer_without_bias",
        rms_norm_eps=fields.get("layer_norm_eps", 1e-5, float),
        parallel_feed_forward=True,
        rope_interleave=True,
        query_key_norm="each_head" if fields.get("use_qk_norm", False, bool) else "none",
        logit_divisor=1.0 / fields.positive("logit_scale", 0.0625),
    )


def cohere2(fields: ConfigFields) -> ModelConfig:
    """The same with a window in three layers of four, and without rotation in the others."""
    config = cohere(fields.but(use_qk_norm=None), rope_theta=1e4)
    window = fields.get("sliding_window", 4096, int)
    pattern = fields.get("sliding_window_pattern", fields.get("_sliding_window_pattern", 4, int), int)
    windows = windows_by_pattern(fields, window, pattern, config.num_layers)
    return replace(config, layer_windows=windows, unrotated_layers=layers_without_window(windows))
