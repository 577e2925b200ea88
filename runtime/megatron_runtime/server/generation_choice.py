"""The values of ``--generation-config``: which file has the sampling defaults."""

from __future__ import annotations

from pathlib import Path

from megatron_runtime.errors import ConfigurationError

FLAG = "--generation-config"
AUTO = "auto"
"""The file in the checkpoint's folder, if it has one."""
NONE = "vllm"
"""No defaults other than those of the API."""
FILE = "generation_config.json"


def check_choice(choice: str) -> None:
    """Raises ConfigurationError unless ``choice`` is auto, vllm, or a path that exists."""
    if choice not in (AUTO, NONE) and not file_of(choice).is_file():
        raise ConfigurationError(
            f"{FLAG} {choice}: no such file, and no folder with a {FILE}; give {AUTO}, {NONE} or a path",
            field="generation_config",
        )


def file_of(path: str) -> Path:
    """The file that ``path`` names, itself or by its folder."""
    return Path(path) / FILE if Path(path).is_dir() else Path(path)
