"""The names for ``--parsers``: parsers for reasoning and tool calls in the model's output."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_runtime.errors import ConfigurationError

TOOL_PARSERS = ("hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder")
REASONING_PARSERS = ("deepseek_r1", "qwen3")
MEGATRON_NAMES = {
    "deepseek-r1-reasoning": "deepseek_r1",
    "nemotron-v3-reasoning": "deepseek_r1",
    "qwen3-coder-tool": "qwen3_coder",
}
"""The parsers by their names in Megatron."""


def check_parsers(names: Sequence[str]) -> None:
    """Raises ConfigurationError for an unknown name, and for two parsers of one kind."""
    for name in names:
        if MEGATRON_NAMES.get(name, name) not in (*TOOL_PARSERS, *REASONING_PARSERS):
            known = f"{', '.join(TOOL_PARSERS)} for tools, or {', '.join(REASONING_PARSERS)} for reasoning, or"
            known += f" Megatron's names: {', '.join(MEGATRON_NAMES)}"
            raise ConfigurationError(f"parsers: {name!r} is unknown; use {known}", field="parsers")
    for kind in (TOOL_PARSERS, REASONING_PARSERS):
        chosen = [name for name in names if MEGATRON_NAMES.get(name, name) in kind]
        if len(chosen) > 1:
            message = f"parsers: {chosen[0]} and {chosen[1]} have the same purpose; leave one out"
            raise ConfigurationError(message, field="parsers")


def chosen_parser(names: Sequence[str], kind: Sequence[str]) -> str | None:
    """The chosen parser of this kind, or None."""
    return next((known for name in names if (known := MEGATRON_NAMES.get(name, name)) in kind), None)
