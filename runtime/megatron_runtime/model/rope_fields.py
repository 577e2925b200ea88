"""The rotary settings in a ``config.json``."""

from __future__ import annotations

import math
from typing import Any

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import RopeScaling
from megatron_runtime.model.config_fields import MISSING, ConfigFields


def rope_settings(fields: ConfigFields, head_dim: int, default_theta: float) -> dict[str, Any]:
    """``rope_theta``, ``rope_scaling`` and ``rotary_dim`` of a ModelConfig.

    Newer files have ``rope_parameters``; older ones ``rope_scaling``, with the rest beside it.
    """
    rope = fields.within("rope_parameters", "rope_scaling")
    share = rope.positive("partial_rotary_factor", fields.positive("partial_rotary_factor", 1.0))
    return {
        "rope_theta": rope.positive("rope_theta", fields.positive("rope_theta", default_theta)),
        "rope_scaling": rope_scaling(rope, fields),
        "rotary_dim": None if share == 1.0 else int(head_dim * share),
    }


def rope_scaling(rope: ConfigFields, fields: ConfigFields) -> RopeScaling:
    """The scaling in ``rope``, an object of the configuration ``fields``; CheckpointError when it isn't known."""
    kind = rope.get("rope_type", rope.get("type", "default", str), str)
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", rope.positive("factor", MISSING))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            rope.positive("factor", MISSING),
            rope.get("low_freq_factor", MISSING, float),
            rope.get("high_freq_factor", MISSING, float),
            rope.get("original_max_position_embeddings", MISSING, int),
        )
    if kind in ("longrope", "su"):
        return _longrope(rope, fields)
    raise CheckpointError(
        f"{fields.path}: rope type {kind!r} is not known; the known ones are default, linear, llama3 and longrope. "
        "Remove the scaling to serve the model at its original length"
    )


def _longrope(rope: ConfigFields, fields: ConfigFields) -> RopeScaling:
    """LongRoPE (Ding et al.), with the magnitude that its authors give for the ratio of the two lengths."""
    name = "original_max_position_embeddings"
    original = rope.get(name, None, int) or fields.get(name, MISSING, int)
    factor = rope.positive("factor", fields.get("max_position_embeddings", MISSING, int) / max(original, 1))
    wanted = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 and original > 1 else 1.0
    return RopeScaling(
        "longrope",
        factor,
        original_max_position_embeddings=original,
        short_factors=rope.numbers("short_factor", float),
        long_factors=rope.numbers("long_factor", float),
        magnitude=rope.positive("attention_factor", wanted),
    )
