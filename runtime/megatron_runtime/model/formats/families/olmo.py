"""OLMo 2 and OLMo 3."""

from __future__ import annotations

from dataclasses import replace

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.formats.config_fields import ConfigFields
from megatron_runtime.model.formats.families.llama import llama, windows_by_pattern


def olmo2(fields: ConfigFields) -> ModelConfig:
    """Norms of outputs, and of queries and keys over all heads."""
    return replace(llama(fields), norm_placement="after", query_key_norm="projection")


def olmo3(fields: ConfigFields) -> ModelConfig:
    """OLMo 2 with a window, and without rotary scaling, in three layers of four."""
    fields = fields.or_else({"rms_norm_eps": 1e-5, "rope_theta": 5e5})
    rope = fields.within("rope_parameters")
    local = rope.within("sliding_attention")
    local.refuse("rope_type", "default")
    whole = rope.get("full_attention", {}, dict)
    config = olmo2(fields.but(rope_parameters=whole) if whole else fields)
    window = fields.get("sliding_window", 4096, int)
    return replace(
        config,
        layer_windows=windows_by_pattern(fields, window, 4, config.num_layers),
        local_rope_theta=local.positive("rope_theta", fields.positive("rope_theta", None)),
    )
