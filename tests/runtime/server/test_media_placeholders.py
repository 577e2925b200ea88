"""``--media-placeholder``: parts of messages that are not text become texts that name them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from megatron_runtime.server.bodies.messages_protocol import MessagesBody
from megatron_runtime.server.bodies.protocol import ChatCompletionBody
from megatron_runtime.server.bodies.responses_protocol import ResponsesBody
from megatron_runtime.server.media_placeholders import replace_media

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [IMAGE, {"type": "text", "text": "a cat"}]}
SOUND = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
CASES: list[Any] = [
    (
        ChatCompletionBody,
        "messages",
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "See "}, {"type": "image_url", "image_url": {"url": "x"}}],
            }
        ],
        ["See [image]"],
    ),
    (
        ChatCompletionBody,
        "messages",
        [{"role": "user", "content": [SOUND, {"type": "file", "file": {}}]}],
        ["[audio][file]"],
    ),
    (
        ResponsesBody,
        "input",
        [
            {
                "role": "user",
                "content": [{"type": "input_image", "image_url": "x"}, {"type": "input_text", "text": "?"}],
            },
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file", "file_id": "f"}]},
        ],
        ["[image]?", "", "[file]"],
    ),
    (
        MessagesBody,
        "messages",
        [{"role": "user", "content": [RESULT, {"type": "document", "source": {}}]}],
        ["[image]\na cat", "[document]"],
    ),
]


def texts(body: Any) -> list[str]:
    messages = body.chat_messages if isinstance(body, MessagesBody) else body.messages
    return [message.for_template()["content"] for message in messages]


@pytest.mark.parametrize(("kind", "name", "messages", "expected"), CASES)
def test_media_are_replaced_by_their_names_or_refused(
    kind: type[BaseModel], name: str, messages: list[Any], expected: list[str]
) -> None:
    body = {"model": "m", "max_tokens": 5, "max_output_tokens": 5, name: messages}
    assert texts(kind.model_validate(replace_media(body))) == expected
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert {error["loc"][0] for error in refused.value.errors()} == {name}


@pytest.mark.parametrize(
    "body", [None, [1], {"messages": "a"}, {"messages": [7, {"content": [None, {"type": []}, {"type": "text"}]}]}]
)
def test_bodies_without_media_stay_as_they_are(body: Any) -> None:
    assert replace_media(body) == body
