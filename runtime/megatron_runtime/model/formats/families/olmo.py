"""OLMo 2."""

from __future__ import annotations

from dataclasses import replace

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.formats.config_fields import ConfigFields
from megatron_runtime.model.formats.families.llama import llama


def olmo2(fields: ConfigFields) -> ModelConfig:
    """Norms of outputs, and of queries and keys over all heads."""
    return replace(llama(fields), norm_placement="after", query_key_norm="projection")
