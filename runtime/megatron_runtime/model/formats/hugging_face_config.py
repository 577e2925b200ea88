"""A Hugging Face ``config.json`` as the configuration of a decoder."""

from __future__ import annotations

from pathlib import Path

from megatron_runtime.model.config import ModelConfig, refuse_architecture
from megatron_runtime.model.formats.config_fields import ConfigFields, read_json
from megatron_runtime.model.formats.families import FAMILIES


def hugging_face_config(path: Path) -> ModelConfig:
    """The configuration in ``path`` (a config.json). Raises CheckpointError if it is not supported."""
    fields = ConfigFields(path, read_json(path))
    architecture = fields.get("model_type", None, str)
    if architecture not in FAMILIES:
        raise refuse_architecture(str(path), architecture, FAMILIES)
    config = FAMILIES[architecture](fields)
    config.check(str(path))
    return config
