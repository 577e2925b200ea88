"""Adapts the messages of a chat to its template: tools, calls, results and reasoning of earlier turns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.model.tokenizer.chat_template import ChatTemplate
from megatron_runtime.server.bodies.call_arguments import JoinableArguments
from megatron_runtime.server.messages.tool_parsers.tool_format import ToolFormat

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None

_BEFORE = """You can call functions. These are there, each as JSON on a line of its own:
<tools>
"""
_AFTER = """
</tools>
To call one, answer with its name and its arguments, like this:
{example}
{results}Call none where the answer needs none."""
_RESULTS = "The result comes back within <tool_response></tool_response>. "
_SYSTEM_TOOLS = re.compile(r"message(\.tools\b|\[['\"]tools['\"]\])")
_TESTS_FOR_NONE = re.compile(r"content(['\"]\])? is none")
_PROBED = "name_of_the_probed_call"
_KIMI_ID = re.compile(r"functions\.[^:]+:\d+")


def for_template(
    messages: Sequence[Message], tools: Tools, template: ChatTemplate, tool_format: ToolFormat
) -> tuple[list[dict[str, Any]], Tools]:
    """The messages and tools in the form that the template expects.

    A template without tool support gets the tools as part of the system message, in the words of ``tool_format``, and
    calls and results of earlier turns as text unless it has a form for them. Calls that the template would drop are
    text too.
    """
    plain = [dict(message) for message in messages]
    if tool_format.has_channels:
        plain = _with_single_calls([_with_thinking(message) for message in plain])
    if tool_format.name == "kimi_k2":
        plain = _with_numbered_calls(plain)
    if _TESTS_FOR_NONE.search(template.source):
        # DeepSeek-R1's template renders the calls only of messages without content.
        plain = [{**each, "content": each["content"] or None} if each.get("tool_calls") else each for each in plain]
    has_calls = "tool_calls" in template.source
    if (has_calls or template.takes_tools) and not tool_format.has_channels:
        plain = [_with_shown_calls(message, template, tool_format) for message in plain]
    if template.takes_tools:
        return plain, tools
    if not has_calls:
        plain = _merged([_as_text(message, tool_format) for message in plain])
    if not tools:
        return plain, None
    if _SYSTEM_TOOLS.search(template.source):  # Phi-4-mini's
        return _in_system_message(plain, tools=_json([tool["function"] for tool in tools])), None
    listed = "\n".join(_json(tool["function"]) for tool in tools)
    after = _AFTER.format(example=tool_format.example, results="" if has_calls else _RESULTS)
    return _in_system_message(plain, text=_BEFORE + listed + after), None


def _in_system_message(messages: list[dict[str, Any]], *, text: str = "", **fields: Any) -> list[dict[str, Any]]:
    if messages and messages[0]["role"] == "system":
        first, *rest = messages
        content = "\n\n".join(part for part in (first["content"], text) if part)
    else:
        first, rest, content = {"role": "system"}, messages, text
    return [{**first, "content": content, **fields}, *rest]


def _as_text(message: dict[str, Any], tool_format: ToolFormat) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    return _with_calls_as_text(message, tool_format)


def _with_calls_as_text(message: dict[str, Any], tool_format: ToolFormat) -> dict[str, Any]:
    calls = message.pop("tool_calls", None)
    if not calls:
        return message
    functions = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    content = [message["content"]] if message["content"] else []
    return {**message, "content": "\n".join([*content, tool_format.call_format.text(functions)])}


def _with_shown_calls(message: dict[str, Any], template: ChatTemplate, tool_format: ToolFormat) -> dict[str, Any]:
    """The message with its calls as text if the template would drop them.

    DeepSeek-R1's template drops the calls of a message with content, that of Granite 3 all of them.
    """
    # The content matters only by whether there is any, and so there are few different probes.
    if not message.get("tool_calls") or _shows_calls(template, message["content"] and "So."):
        return message
    return _with_calls_as_text(message, tool_format)


@lru_cache(maxsize=64)
def _shows_calls(template: ChatTemplate, content: str | None) -> bool:
    """Whether the template shows the call of a message with this content. True for a template that fails on the probe:
    the conversation itself shows why.
    """
    function = {"name": _PROBED, "arguments": JoinableArguments({"a": 1})}
    # Kimi's template shows the id in place of the name.
    call = {"id": f"functions.{_PROBED}:0", "type": "function", "function": function}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "So."},
    ]
    described = {"name": "f", "description": "F.", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": described}] if template.takes_tools else None
    try:
        return _PROBED in template.render(messages, tools=tools, add_generation_prompt=True)
    except InvalidRequestError:
        return True


def _merged(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with neighbouring results as one message: some templates require alternating roles."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        is_result = message["content"].startswith("<tool_response>") and message["role"] == "user"
        if is_result and merged and merged[-1]["content"].endswith("</tool_response>"):
            merged[-1] = {**merged[-1], "content": f"{merged[-1]['content']}\n{message['content']}"}
        else:
            merged.append(message)
    return merged


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the name in templates of Harmony.

    They reject reasoning beside content and a call.
    """
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    if message["role"] != "assistant" or not thoughts or (message["content"] and message.get("tool_calls")):
        return message
    return {"thinking": thoughts, **message}


def _with_single_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with each call in a message of its own, before its result.

    Templates of Harmony show the first call of a message, and name a result after the last call.
    """
    found: list[dict[str, Any]] = []
    placed: set[int] = set()
    for at, message in enumerate(messages):
        if at in placed:
            continue
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            found.append(message)
            continue
        for number, call in enumerate(calls):
            first = message if number == 0 else {"role": message["role"], "content": ""}
            found.append({**first, "tool_calls": [call]})
            later = (index for index in range(at + 1, len(messages)) if index not in placed)
            result = next((index for index in later if _is_result_of(call, messages[index])), None)
            if result is not None:
                found.append(messages[result])
                placed.add(result)
    return found


def _is_result_of(call: Mapping[str, Any], message: Message) -> bool:
    return message["role"] == "tool" and "id" in call and message.get("tool_call_id") == call["id"]


def _with_numbered_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with ids of the form ``functions.name:number``, which Kimi's template writes into the prompt."""
    ids: dict[str, str] = {}
    number = 0
    found = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            known = call.get("id") or ""
            new = known if _KIMI_ID.fullmatch(known) else f"functions.{call['function']['name']}:{number}"
            calls.append({**call, "id": new})
            ids[known] = new
            number += 1
        changed: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if (answered := message.get("tool_call_id")) in ids:
            changed["tool_call_id"] = ids[answered]
        found.append({**message, **changed})
    return found


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
