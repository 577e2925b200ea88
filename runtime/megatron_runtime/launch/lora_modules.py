"""The flag ``--lora-modules`` in vLLM's notations, and the check of its adapters before the start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_runtime.errors import CheckpointError, ConfigurationError
from megatron_runtime.sampling_params import LONGEST_NAME

Modules = tuple[tuple[str, str], ...]
"""Names and folders of adapters."""


def parse_modules(values: Sequence[str]) -> Modules:
    """The adapters of the flag's values.

    Raises:
        ConfigurationError: A value has none of the notations, or a name is given twice.
    """
    found: dict[str, str] = {}
    for value in values:
        name, path = _parse(value)
        if name in found:
            raise ConfigurationError(f"--lora-modules {value}: {name} is given twice; choose another name")
        found[name] = path
    return tuple(found.items())


def check_modules(modules: Modules, served_name: str, max_loras: int, max_rank: int) -> None:
    """Check the adapters as far as possible without the model.

    Raises:
        ConfigurationError: They are too many, one has the name of the model, or its configuration is not supported.
    """
    from megatron_runtime.model.lora.adapter_config import AdapterConfig

    for flag, value in (("--max-loras", max_loras), ("--max-lora-rank", max_rank)):
        if value < 1:
            raise ConfigurationError(f"{flag} {value}: use at least 1")
    if len(modules) > max_loras:
        raise ConfigurationError(
            f"--lora-modules: {len(modules)} adapters are more than --max-loras {max_loras}; raise it"
        )
    for name, path in modules:
        if name == served_name:
            raise ConfigurationError(f"--lora-modules {name}={path}: the model has this name; choose another one")
        try:
            config = AdapterConfig.read(Path(path))
        except CheckpointError as error:
            raise ConfigurationError(f"--lora-modules {name}={path}: {error}") from error
        if config.rank > max_rank:
            raise ConfigurationError(
                f"--lora-modules {name}={path}: r={config.rank} is more than --max-lora-rank {max_rank}; raise it"
            )


def _parse(value: str) -> tuple[str, str]:
    name, separator, path = value.partition("=")
    if value.lstrip().startswith("{"):
        try:
            fields = json.loads(value)
            name, path = fields["name"], fields["path"]
        except (ValueError, KeyError, TypeError):
            name = path = ""
    elif not separator:
        path = ""
    if not (isinstance(name, str) and isinstance(path, str) and 0 < len(name) <= LONGEST_NAME and path):
        raise ConfigurationError(
            f'--lora-modules {value}: use name=folder, or {{"name": "...", "path": "..."}}, with a name of up to '
            f"{LONGEST_NAME} characters"
        )
    return name, path
