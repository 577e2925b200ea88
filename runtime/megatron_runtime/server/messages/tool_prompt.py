"""Tools for a model whose chat template does not know of any: told in the system's message, in the way of Hermes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

_BEFORE = """You can call functions. These are there, each as JSON on a line of its own:
<tools>
"""
_AFTER = """
</tools>
To call one, answer with its name and its arguments as JSON, like this:
<tool_call>
{"name": "a_function", "arguments": {"a_parameter": 1}}
</tool_call>
The result comes back within <tool_response></tool_response>. Call none where the answer needs none."""


def with_tools_in_words(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The same conversation without anything that only templates which take tools would tell."""
    plain = [_in_words(message) for message in messages]
    if not tools:
        return plain
    told = _BEFORE + "\n".join(_json(tool["function"]) for tool in tools) + _AFTER
    if plain and plain[0]["role"] == "system":
        first = plain[0]
        return [{**first, "content": f"{first['content']}\n\n{told}"}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


def _in_words(message: Message) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    words = [message["content"]] if message["content"] else []
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([*words, *_calls(calls)])}


def _calls(calls: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    return (f"<tool_call>\n{_json(call['function'])}\n</tool_call>" for call in calls)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
