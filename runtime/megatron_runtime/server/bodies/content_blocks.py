"""Content blocks of Anthropic's Messages API, and their conversion to messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from megatron_runtime.server.bodies.limits import MAX_PARTS, FirstError, Schema
from megatron_runtime.server.bodies.protocol import ChatMessage
from megatron_runtime.server.bodies.tools import LONGEST_NAME, CalledFunction, ToolCall


class TextBlock(BaseModel):
    """Text. ``cache_control`` and ``citations`` are ignored: prefixes are always cached."""

    type: Literal["text"]
    text: str


class ThinkingBlock(BaseModel):
    """The reasoning of an earlier answer. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(BaseModel):
    """Encrypted reasoning of another provider's answer, which has no text."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(BaseModel):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str = Field(min_length=1, max_length=LONGEST_NAME)
    input: Schema = Field(default_factory=dict)

    def call(self) -> ToolCall:
        """The same as a call in a chat's message."""
        arguments = json.dumps(self.input, ensure_ascii=False)
        return ToolCall(id=self.id, function=CalledFunction(name=self.name, arguments=arguments))


def _tagged(*kinds: str) -> Discriminator:
    """Selects the alternative by ``type``, so that an unknown type gets one error that names the known ones."""

    def kind(block: Any) -> str | None:
        found = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
        return found.replace("_", " ").title().replace(" ", "") if found in kinds else None

    message = f"the type of a block must be one of {', '.join(kinds)}; images and documents are not supported"
    return Discriminator(kind, custom_error_type="block_type", custom_error_message=message)


TaggedText = Annotated[TextBlock, Tag("Text")]
TextBlocks = Annotated[
    list[Annotated[TaggedText, _tagged("text")]],
    Field(max_length=MAX_PARTS),
    FirstError(),
]


class ToolResultBlock(BaseModel):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | TextBlocks = ""
    is_error: bool = False

    def message(self) -> ChatMessage:
        """The same as a message of a chat. Chats have no field for errors, so the text says it."""
        text = text_of(self.content)
        content = f"Error: {text}" if self.is_error else text
        return ChatMessage.model_validate({"role": "tool", "tool_call_id": self.tool_use_id, "content": content})


Block = Annotated[
    TaggedText
    | Annotated[ThinkingBlock, Tag("Thinking")]
    | Annotated[RedactedThinkingBlock, Tag("RedactedThinking")]
    | Annotated[ToolUseBlock, Tag("ToolUse")]
    | Annotated[ToolResultBlock, Tag("ToolResult")],
    _tagged("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]
Blocks = Annotated[list[Block], Field(max_length=MAX_PARTS), FirstError()]


class MessageParam(BaseModel):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks

    def messages(self) -> list[ChatMessage]:
        """The same as messages of a chat: results of tools are messages of their own, before the user's text."""
        if isinstance(self.content, str):
            return [ChatMessage(role=self.role, content=self.content)]
        return [self._answer(self.content)] if self.role == "assistant" else list(self._question(self.content))

    def _answer(self, blocks: Iterable[Block]) -> ChatMessage:
        texts, thoughts, calls = [], [], []
        for block in blocks:
            match block:
                case TextBlock(text=text):
                    texts.append(text)
                case ThinkingBlock(thinking=thinking):
                    thoughts.append(thinking)
                case ToolUseBlock():
                    calls.append(block.call())
        message: dict[str, Any] = {"role": self.role, "content": "".join(texts), "tool_calls": calls or None}
        return ChatMessage.model_validate(message | ({"reasoning_content": "".join(thoughts)} if thoughts else {}))

    def _question(self, blocks: Iterable[Block]) -> Iterator[ChatMessage]:
        texts: list[str] = []
        for block in blocks:
            if isinstance(block, ToolResultBlock):
                yield block.message()
            elif isinstance(block, TextBlock):
                texts.append(block.text)
        if texts:
            yield ChatMessage(role=self.role, content="\n".join(texts))


def text_of(content: str | Iterable[TextBlock]) -> str:
    """The text of a content; blocks are separate paragraphs of it."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
