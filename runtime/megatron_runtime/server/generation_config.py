"""Sampling defaults of a checkpoint: ``generation_config.json``, with vLLM's choices and fields."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.formats.config_fields import read_json
from megatron_runtime.server.bodies.protocol import GenerationBody
from megatron_runtime.server.bodies.sampling_fields import SamplingFields
from megatron_runtime.server.generation_choice import AUTO, FLAG, NONE, file_of
from megatron_runtime.server.options import HttpOptions

logger = logging.getLogger(__name__)

LONGEST_ANSWER = "max_new_tokens"
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class _LongestAnswer(BaseModel):
    max_new_tokens: int = Field(ge=1)


def sampling_defaults(options: HttpOptions, checkpoint: str) -> dict[str, Any]:
    """The defaults of requests to a checkpoint by ``options.generation_config``; logs them.

    Megatron's server has none, so that auto means none for its clients, whose training relies on full distributions.

    Raises:
        CheckpointError: The file can't be read.
        ConfigurationError: A value is invalid; names the file, the field and the value.
    """
    choice = options.generation_config
    path = file_of(checkpoint if choice == AUTO else choice)
    has_file = Path(checkpoint).is_dir() and path.is_file() and not options.megatron_http
    if choice == NONE or (choice == AUTO and not has_file):
        return {}
    fields = read_json(path)
    found = {name: fields[name] for name in (*_FIELDS, LONGEST_ANSWER) if fields.get(name) is not None}
    try:
        SamplingFields.model_validate({name: found[name] for name in _FIELDS if name in found})
        if LONGEST_ANSWER in found:
            _LongestAnswer.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigurationError(
            f"{path}: {first['loc'][0]}: {first['msg']} (got {first['input']!r}); correct the file, or start with "
            f"{FLAG} {NONE}",
            field="generation_config",
        ) from None
    if found:
        shown = ", ".join(f"{name}={value}" for name, value in found.items())
        logger.info("sampling defaults of %s: %s; %s %s disables them", path, shown, FLAG, NONE)
    return found


def fill(body: GenerationBody, defaults: Mapping[str, Any]) -> None:
    """Sets the fields that the request does not have to their defaults."""
    for name in _FIELDS:
        if name in defaults and name not in body.model_fields_set:
            setattr(body, name, defaults[name])
