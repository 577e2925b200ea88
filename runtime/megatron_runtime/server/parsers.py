"""The names for ``--parsers``: parsers for reasoning and tool calls in the model's output."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_runtime.errors import ConfigurationError

TOOL_PARSERS = (
    "hermes",
    "llama3_json",
    "mistral",
    "pythonic",
    "qwen3_coder",
    "openai",
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "kimi_k2",
    "minimax_m2",
    "granite",
    "phi4_mini_json",
    "gemma3",
    "llama4_pythonic",
)
REASONING_PARSERS = (
    "deepseek_r1",
    "qwen3",
    "openai_gptoss",
    "deepseek_v3",
    "glm45",
    "kimi_k2",
    "minimax_m2",
    "granite",
)
MEGATRON_NAMES = {
    "deepseek-r1-reasoning": "deepseek_r1",
    "nemotron-v3-reasoning": "deepseek_r1",
    "qwen3-coder-tool": "qwen3_coder",
}
"""The parsers by their names in Megatron."""
_OTHER_NAMES = {**MEGATRON_NAMES, "harmony": "openai", "llama4_json": "llama3_json"}


def check_parsers(names: Sequence[str]) -> None:
    """Raises ConfigurationError for an unknown name, and for two parsers of one purpose."""
    for name in names:
        if _known(name) not in (*TOOL_PARSERS, *REASONING_PARSERS):
            known = f"{', '.join(TOOL_PARSERS)} for tools, or {', '.join(REASONING_PARSERS)} for reasoning, or"
            known += f" Megatron's names: {', '.join(MEGATRON_NAMES)}"
            raise ConfigurationError(f"parsers: {name!r} is unknown; use {known}", field="parsers")
    both = [name for name in names if _known(name) in TOOL_PARSERS and _known(name) in REASONING_PARSERS]
    only = [[name for name in names if _known(name) in kind and name not in both] for kind in _KINDS]
    for same in (both, *only, [*both, only[0][0], only[1][0]] if both and all(only) else []):
        if len(same) > 1:
            message = f"parsers: {same[0]} and {same[1]} have the same purpose; leave one out"
            raise ConfigurationError(message, field="parsers")


def chosen_parser(names: Sequence[str], kind: Sequence[str]) -> str | None:
    """The chosen parser of this kind, or None.

    A name of both kinds is the parser of both, except where another name has only this kind.
    """
    of_kind = [known for name in names if (known := _known(name)) in kind]
    only = [name for name in of_kind if not all(name in each for each in _KINDS)]
    return next(iter((*only, *of_kind)), None)


_KINDS = (TOOL_PARSERS, REASONING_PARSERS)


def _known(name: str) -> str:
    return _OTHER_NAMES.get(name, name)
