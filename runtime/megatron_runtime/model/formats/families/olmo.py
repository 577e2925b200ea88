"""OLMo 2."""

from __future__ import annotations

from dataclasses import replace

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.formats.config_fields import ConfigFields
from megatron_runtime.model.formats.families.llama import llama


def olmo2(fields: ConfigFields) -> ModelConfig:
    """Norms on the way out, and over the whole of the queries and of the keys."""
    return replace(llama(fields), norm_placement="after", query_key_norm="projection")
