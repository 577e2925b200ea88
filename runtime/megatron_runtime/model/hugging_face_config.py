"""A Hugging Face ``config.json`` as the configuration of a decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import KNOWN_ARCHITECTURES, ModelConfig, RopeScaling, refuse_architecture

_QKV_BIAS_ALWAYS = ("qwen2",)
_QUERY_KEY_NORM = ("qwen3",)
_MISSING = object()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; CheckpointError names the file when there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror}). Check the path and its permissions") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON ({error}). Fetch the file again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, expected a JSON object. Fetch the file again")
    return found


def hugging_face_config(path: Path) -> ModelConfig:
    """The decoder that ``path`` (a config.json) describes; CheckpointError when it can't be served."""
    values = _Fields(path, read_json(path))
    architecture = values.get("model_type", None, str)
    if architecture not in KNOWN_ARCHITECTURES:
        raise refuse_architecture(str(path), architecture)
    heads, hidden = values.get("num_attention_heads", _MISSING, int), values.get("hidden_size", _MISSING, int)
    layers = values.get("num_hidden_layers", _MISSING, int)
    attention_bias = values.get("attention_bias", False, bool)
    if (activation := values.get("hidden_act", "silu", str)) not in ("silu", "swish"):
        raise CheckpointError(f"{path}: hidden_act is {activation!r}, only 'silu' is supported")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=values.get("vocab_size", _MISSING, int),
        hidden_size=hidden,
        intermediate_size=values.get("intermediate_size", _MISSING, int),
        num_layers=layers,
        num_attention_heads=heads,
        num_kv_heads=values.get("num_key_value_heads", heads, int),
        head_dim=values.get("head_dim", hidden // max(heads, 1), int),
        max_position_embeddings=values.get("max_position_embeddings", 2048, int),
        rms_norm_eps=values.get("rms_norm_eps", 1e-6, float),
        rope_theta=_rope(values).get("rope_theta", values.get("rope_theta", 10000.0, float), float),
        rope_scaling=_rope_scaling(values),
        tie_word_embeddings=values.get("tie_word_embeddings", False, bool),
        qkv_bias=attention_bias or architecture in _QKV_BIAS_ALWAYS,
        attention_output_bias=attention_bias and architecture not in _QKV_BIAS_ALWAYS,
        mlp_bias=values.get("mlp_bias", False, bool),
        query_key_norm=architecture in _QUERY_KEY_NORM,
        layer_windows=_layer_windows(values, architecture, layers),
    )
    config.check(str(path))
    return config


class _Fields:
    """The fields of a JSON object, with errors that name the file, the field and the value."""

    def __init__(self, path: Path, fields: dict[str, Any]) -> None:
        self.path = path
        self._fields = fields

    def get(self, name: str, default: Any, kind: type) -> Any:
        """The field, or ``default`` when it is absent or null; a float field may be written as an integer."""
        value = self._fields.get(name)
        if value is None:
            if default is _MISSING:
                raise CheckpointError(f"{self.path}: {name} is missing, expected {_KINDS[kind]}. Fetch the file again")
            return default
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise CheckpointError(f"{self.path}: {name} is {value!r}, expected {_KINDS[kind]}. Fetch the file again")
        return value


_KINDS: dict[type, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "an object",
    list: "a list",
}


def _rope(values: _Fields) -> _Fields:
    """The rotary fields: ``rope_parameters`` in newer files, ``rope_scaling`` in older ones."""
    fields = values.get("rope_parameters", None, dict) or values.get("rope_scaling", None, dict) or {}
    return _Fields(values.path, fields)


def _rope_scaling(values: _Fields) -> RopeScaling:
    rope = _rope(values)
    kind = rope.get("rope_type", rope.get("type", "default", str), str)
    if rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0, float), float) != 1.0:
        raise CheckpointError(f"{values.path}: partial_rotary_factor is not 1, only whole heads can be rotated")
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", rope.get("factor", _MISSING, float))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            rope.get("factor", _MISSING, float),
            rope.get("low_freq_factor", _MISSING, float),
            rope.get("high_freq_factor", _MISSING, float),
            rope.get("original_max_position_embeddings", _MISSING, int),
        )
    raise CheckpointError(
        f"{values.path}: rope type {kind!r} is not known; the known ones are default, linear and llama3. "
        "Remove the scaling to serve the model at its original length"
    )


def _layer_windows(values: _Fields, architecture: str, layers: int) -> tuple[int | None, ...]:
    window = values.get("sliding_window", None, int)
    if architecture == "llama" or window is None:
        return ()
    if kinds := values.get("layer_types", None, list):
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if architecture == "mistral":
        return (window,) * layers
    if not values.get("use_sliding_window", False, bool):
        return ()
    first = values.get("max_window_layers", 28, int)
    return tuple(window if layer >= first else None for layer in range(layers))
