"""``POST /v1/messages``: converts deltas to a message, complete or as stream events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.anthropic.answer_blocks import (
    AnswerBlock,
    Event,
    TextAnswerBlock,
    ThinkingAnswerBlock,
    ToolUseAnswerBlock,
)
from megatron_runtime.server.anthropic.error_bodies import error_body
from megatron_runtime.server.bodies.messages_protocol import MessagesBody
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.generation.choice import Delta
from megatron_runtime.server.messages.message_parts import CallArguments, CallStart, Content, Part, Reasoning
from megatron_runtime.server.openai.answer import Answer, UsageMeter
from megatron_runtime.server.openai.streaming import Chunk


def message(answer: Answer, deltas: Sequence[Delta], tokenizer: Tokenizer) -> dict[str, Any]:
    """The complete message; ``deltas`` has exactly one."""
    builder = _MessageBuilder(answer, tokenizer)
    (delta,) = deltas
    for _event in builder.add(delta):
        pass
    return builder.body()


class MessageEvents:
    """The events of a stream: the message without content, the blocks one by one, the stop reason, and the end."""

    def __init__(self, answer: Answer, tokenizer: Tokenizer) -> None:
        self._message = _MessageBuilder(answer, tokenizer)

    def opening(self) -> Iterator[Chunk]:
        """See ``ChunkWriter``."""
        yield {"type": "message_start", "message": self._message.body()}

    def delta(self, delta: Delta) -> Iterator[Chunk]:
        """See ``ChunkWriter``."""
        yield from self._message.add(delta)

    def ending(self) -> Iterator[Chunk]:
        """See ``ChunkWriter``."""
        body = self._message.body()
        stop = {name: body[name] for name in ("stop_reason", "stop_sequence", "stop_details", "container")}
        yield {"type": "message_delta", "delta": stop, "usage": body["usage"]}
        yield {"type": "message_stop"}

    def failure(self, error: ApiError) -> Iterable[Chunk]:
        """See ``ChunkWriter``."""
        return [error_body(error)]


class _MessageBuilder:
    """A message built from deltas."""

    def __init__(self, answer: Answer, tokenizer: Tokenizer) -> None:
        assert isinstance(answer.body, MessagesBody)
        self._tokenizer = tokenizer
        self._request = answer.body
        self._answer = answer
        self._parser = answer.parsing.new_parser()
        self._blocks: list[AnswerBlock] = []
        self._usage = UsageMeter(answer)
        self._last: Delta | None = None

    def add(self, delta: Delta) -> Iterator[Event]:
        """Adds a delta; returns its events."""
        self._usage.add(delta)
        parts = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            parts += self._parser.finish(is_cut=delta.finish_reason == "length")
        for part in parts:
            yield from self._add(part)
        if delta.finish_reason is None:
            return
        self._last = delta
        if not self._blocks:
            yield from self._open(TextAnswerBlock(0))
        yield from self._blocks[-1].closing()

    def _add(self, part: Part) -> Iterator[Event]:
        index = len(self._blocks)
        last = self._blocks[-1] if self._blocks else None
        match part:
            case CallStart(name):
                yield from self._open(ToolUseAnswerBlock(index, name=name, call_id=self._answer.parsing.call_id()))
                return
            case Reasoning():
                if not self._request.shows_thinking:
                    return
                if not isinstance(last, ThinkingAnswerBlock):
                    yield from self._open(ThinkingAnswerBlock(index, is_omitted=self._request.omits_thoughts))
            case Content():
                if not isinstance(last, TextAnswerBlock):
                    yield from self._open(TextAnswerBlock(index))
            case CallArguments():
                pass
        yield from self._blocks[-1].add(part.text)

    def _open(self, block: AnswerBlock) -> Iterator[Event]:
        if self._blocks:
            yield from self._blocks[-1].closing()
        self._blocks.append(block)
        yield from block.opening()

    def body(self) -> dict[str, Any]:
        """The message; its content is empty until the end."""
        is_finished = self._last is not None
        return {
            "id": f"msg_{self._answer.number}",
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": [block.body() for block in self._blocks] if is_finished else [],
            "stop_reason": self._stop_reason(),
            "stop_sequence": self._stop_sequence(),
            "stop_details": None,
            "container": None,
            "usage": self._usage_body(),
        }

    def _stop_reason(self) -> str | None:
        if self._last is None:
            return None
        if self._last.finish_reason == "length":
            is_limit = self._last.generated_tokens >= self._request.max_tokens
            return "max_tokens" if is_limit else "model_context_window_exceeded"
        if any(isinstance(block, ToolUseAnswerBlock) for block in self._blocks):
            return "tool_use"
        return "end_turn" if self._stop_sequence() is None else "stop_sequence"

    def _stop_sequence(self) -> str | None:
        reason = None if self._last is None else self._last.stop_reason
        return reason if isinstance(reason, str) else None

    def _usage_body(self) -> dict[str, Any]:
        usage = self._usage.body()
        thoughts = [block.text for block in self._blocks if isinstance(block, ThinkingAnswerBlock)]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "cache_creation": None,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": sum(len(self._tokenizer.tokenize(text)) for text in thoughts)},
            "inference_geo": None,
            "server_tool_use": None,
            "service_tier": None,
        }
