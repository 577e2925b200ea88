"""The names of ``--parsers``: what finds reasoning and calls of tools in what the model says."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_runtime.errors import ConfigurationError

TOOL_PARSERS = ("hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder")
REASONING_PARSERS = ("deepseek_r1", "qwen3")


def check_parsers(names: Sequence[str]) -> None:
    """Raises ConfigurationError for a name that there is not, and for two parsers of one kind."""
    for name in names:
        if name not in (*TOOL_PARSERS, *REASONING_PARSERS):
            known = f"for tools {', '.join(TOOL_PARSERS)}, for reasoning {', '.join(REASONING_PARSERS)}"
            raise ConfigurationError(f"parsers: {name!r} is none; there are {known}", field="parsers")
    for kind in (TOOL_PARSERS, REASONING_PARSERS):
        chosen = [name for name in names if name in kind]
        if len(chosen) > 1:
            message = f"parsers: {chosen[0]} and {chosen[1]} are for the same; leave one out"
            raise ConfigurationError(message, field="parsers")


def chosen_parser(names: Sequence[str], kind: Sequence[str]) -> str | None:
    """The one of this kind; None if there is none."""
    return next((name for name in names if name in kind), None)
