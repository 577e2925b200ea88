"""The rotary settings of a ``config.json``."""

from __future__ import annotations

import math
from typing import Any

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.formats.config_fields import MISSING, ConfigFields
from megatron_runtime.model.rope_scaling import RopeScaling


def rope_settings(fields: ConfigFields, head_dim: int, default_theta: float) -> dict[str, Any]:
    """``rope_theta``, ``rope_scaling``, ``rotary_dim`` and ``max_position_embeddings`` of a ModelConfig.

    Newer files have ``rope_parameters``; older ones have ``rope_scaling`` and separate fields.
    """
    rope = fields.within("rope_parameters", "rope_scaling")
    share = rope.positive("partial_rotary_factor", fields.positive("partial_rotary_factor", 1.0))
    scaling = rope_scaling(rope, fields)
    length = fields.get("max_position_embeddings", 2048, int)
    if scaling.kind == "yarn":  # usually added by hand to a file with the original length
        length = max(length, int(scaling.factor * scaling.original_max_position_embeddings))
    return {
        "max_position_embeddings": length,
        "rope_theta": rope.positive("rope_theta", fields.positive("rope_theta", default_theta)),
        "rope_scaling": scaling,
        "rotary_dim": None if share == 1.0 else int(head_dim * share),
    }


def rope_scaling(rope: ConfigFields, fields: ConfigFields) -> RopeScaling:
    """The scaling in ``rope``, an object of the configuration ``fields``. Raises CheckpointError for unknown types."""
    kind = rope.get("rope_type", rope.get("type", "default", str), str)
    if kind in ("default", "dynamic"):  # dynamic scaling applies only beyond the served length
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
    if kind in ("longrope", "su") or (kind == "yarn" and rope.numbers("long_factor", float)):
        return _longrope(rope, fields)  # early files of Phi-3 use all three names
    if kind == "yarn":
        return _yarn(rope, fields)
    raise CheckpointError(
        f"{fields.path}: rope type {kind!r} is not known; the known ones are default, linear, dynamic, "
        "llama3, yarn and longrope. "
        "Remove the scaling to serve the model at its original length"
    )


def _yarn(rope: ConfigFields, fields: ConfigFields) -> RopeScaling:
    """YaRN (Peng et al.), with the authors' magnitude for the factor, or the ratio of two magnitudes."""
    length = fields.get("max_position_embeddings", MISSING, int)
    name = "original_max_position_embeddings"
    original = fields.get(name, None, int) or rope.get(name, length, int)
    if original < 1:
        raise CheckpointError(f"{fields.path}: {name} is {original}, expected 1 or more. Fetch the file again")
    factor = rope.positive("factor", max(length, 1) / original)
    scales = (rope.get("mscale", 0.0, float), rope.get("mscale_all_dim", 0.0, float))
    above, below = (yarn_magnitude(factor, scale) for scale in (scales if min(scales) > 0.0 else (1.0, 0.0)))
    return RopeScaling(
        "yarn",
        factor,
        low_frequency_factor=rope.positive("beta_slow", 1.0),
        high_frequency_factor=rope.positive("beta_fast", 32.0),
        original_max_position_embeddings=original,
        whole_channels=rope.get("truncate", True, bool),
        magnitude=rope.positive("attention_factor", above / below),
    )


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """The authors' factor of queries and keys for YaRN with ``factor``."""
    return 1.0 + 0.1 * scale * math.log(max(factor, 1.0))


def _longrope(rope: ConfigFields, fields: ConfigFields) -> RopeScaling:
    """LongRoPE (Ding et al.), with the authors' magnitude for the ratio of the two lengths."""
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
