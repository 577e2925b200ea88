"""Replaces the parts of messages that a model of text can't read by texts that name them, as ``--media-placeholder``.

Bodies are converted before they are validated; anything unexpected in them is left for the validation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_NOUNS = {
    "image_url": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "file": "file",
    "input_image": "image",
    "input_file": "file",
    "image": "image",
    "document": "document",
}
"""What the types of parts are, in chats, in responses and in Anthropic's messages."""
_OF_RESPONSES = ("input_image", "input_file")
_LISTS = ("messages", "input")
_CONTENTS = ("content", "output")


def replace_media(body: Any) -> Any:
    """The body of a chat, a response or a message with ``[image]``, ``[audio]``, ... for parts that are not text."""
    if not isinstance(body, dict):
        return body
    changed = {name: _each(body[name], _message) for name in _LISTS if isinstance(body.get(name), list)}
    return body | changed if changed else body


def _message(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    changed = {name: _each(message[name], _part) for name in _CONTENTS if isinstance(message.get(name), list)}
    return message | changed if changed else message


def _part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "tool_result":
        return _message(part)
    noun = _NOUNS.get(kind) if isinstance(kind, str) else None
    if noun is None:
        return part
    return {"type": "input_text" if kind in _OF_RESPONSES else "text", "text": f"[{noun}]"}


def _each(items: list[Any], convert: Callable[[Any], Any]) -> list[Any]:
    return [convert(item) for item in items]
