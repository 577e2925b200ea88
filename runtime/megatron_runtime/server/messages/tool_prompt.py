"""Describes tools in the system message, in Hermes' format, for chat templates without tool support."""

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
{"name": <name of the function>, "arguments": <object with its parameters>}
</tool_call>
The result comes back within <tool_response></tool_response>. Call none where the answer needs none."""


def with_tools_as_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The conversation with tools, calls and results converted to plain messages."""
    plain = [_as_text(message) for message in messages]
    if not tools:
        return plain
    description = _BEFORE + "\n".join(_json(tool["function"]) for tool in tools) + _AFTER
    if plain and plain[0]["role"] == "system":
        first = plain[0]
        return [{**first, "content": f"{first['content']}\n\n{description}"}, *plain[1:]]
    return [{"role": "system", "content": description}, *plain]


def _as_text(message: Message) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    content = [message["content"]] if message["content"] else []
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([*content, *_calls(calls)])}


def _calls(calls: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    return (f"<tool_call>\n{_json(call['function'])}\n</tool_call>" for call in calls)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
