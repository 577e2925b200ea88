"""``POST /v1/responses``: converts deltas to a response, complete or as stream events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.bodies.responses_protocol import ResponsesBody
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.generation.choice import Delta
from megatron_runtime.server.messages.message_parts import CallStart, Content, Part, Reasoning
from megatron_runtime.server.openai.answer import Answer, UsageMeter
from megatron_runtime.server.openai.response_items import (
    Event,
    FunctionCallItem,
    Item,
    MessageItem,
    ReasoningItem,
    item_number,
)
from megatron_runtime.server.openai.streaming import Chunk


def response(answer: Answer, deltas: Sequence[Delta], tokenizer: Tokenizer) -> dict[str, Any]:
    """The complete response; ``deltas`` has exactly one."""
    builder = _Response(answer, tokenizer)
    (delta,) = deltas
    for _ in builder.add(delta):
        pass
    return builder.body()


class ResponseEvents:
    """The numbered events of a stream; the last one has the complete response or the error."""

    def __init__(self, answer: Answer, tokenizer: Tokenizer) -> None:
        self._response = _Response(answer, tokenizer)
        self._sent = 0

    def opening(self) -> Iterator[Chunk]:
        """See ``ChunkWriter``."""
        yield self._event("created", response=self._response.body())
        yield self._event("in_progress", response=self._response.body())

    def delta(self, delta: Delta) -> Iterator[Chunk]:
        """See ``ChunkWriter``."""
        for kind, fields in self._response.add(delta):
            yield self._event(kind, **fields)

    def ending(self) -> Iterator[Chunk]:
        """See ``ChunkWriter``."""
        body = self._response.body()
        yield self._event(body["status"], response=body)

    def failure(self, error: ApiError) -> Iterator[Chunk]:
        """See ``ChunkWriter``."""
        yield self._event("failed", response=self._response.failed(error))

    def _event(self, kind: str, **fields: Any) -> Chunk:
        self._sent += 1
        return {"type": f"response.{kind}", "sequence_number": self._sent - 1, **fields}


class _Response:
    """A response built from deltas."""

    def __init__(self, answer: Answer, tokenizer: Tokenizer) -> None:
        assert isinstance(answer.body, ResponsesBody)
        self._request = answer.body
        self._answer = answer
        self._tokenizer = tokenizer
        self._texts = answer.token_texts(tokenizer)
        self._parser = answer.parsing.new_parser()
        self._items: list[Item] = []
        self._logprobs: list[dict[str, Any]] = []  # of tokens that have produced no text yet
        self._usage = UsageMeter(answer)
        self._finish_reason: str | None = None

    def add(self, delta: Delta) -> Iterator[Event]:
        """Adds a delta; returns its events."""
        self._usage.add(delta)
        self._logprobs += [self._texts.scored(entry) for entry in delta.log_probs]
        parts = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            parts += self._parser.finish(is_cut=delta.finish_reason == "length")
        for part in parts:
            yield from self._add(part)
        if delta.finish_reason is None:
            return
        if not self._items:
            yield from self._open(MessageItem(0, item_number()))
        if self._logprobs and isinstance(last := self._items[-1], MessageItem):
            yield last.add("", self._logprobs)
        self._finish_reason = delta.finish_reason
        yield from self._items[-1].closing(self._status)

    def _add(self, part: Part) -> Iterator[Event]:
        match part:
            case Content(text):
                if not self._items or not isinstance(self._items[-1], MessageItem):
                    yield from self._open(MessageItem(len(self._items), item_number()))
            case Reasoning(text):
                if not self._items or not isinstance(self._items[-1], ReasoningItem):
                    yield from self._open(ReasoningItem(len(self._items), item_number()))
            case CallStart(name, own_id):
                called = {"name": name, "call_id": own_id or self._answer.parsing.call_id()}
                yield from self._open(FunctionCallItem(len(self._items), item_number(), **called))
                return
            case _:
                text = part.text
        logprobs, self._logprobs = self._logprobs, []
        item = self._items[-1]
        yield item.add(text, logprobs) if isinstance(item, MessageItem) else item.add(text)

    def _open(self, item: Item) -> Iterator[Event]:
        if self._items:
            yield from self._items[-1].closing("completed")
        self._items.append(item)
        yield from item.opening()

    def body(self) -> dict[str, Any]:
        """The response so far."""
        request = self._request
        is_finished = self._finish_reason is not None
        return {
            "id": f"resp_{self._answer.number}",
            "object": "response",
            "created_at": self._answer.created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "background": False,
            "error": None,
            "frequency_penalty": request.frequency_penalty,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": self._output() if is_finished else [],
            "parallel_tool_calls": request.parallel_tool_calls,
            "presence_penalty": request.presence_penalty,
            "previous_response_id": None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": request.reasoning.effort, "summary": request.reasoning.summary},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": request.temperature,
            "text": {
                "format": request.text.format.model_dump(exclude_none=True),
                **({} if request.text.verbosity is None else {"verbosity": request.text.verbosity}),
            },
            "tool_choice": choice if isinstance(choice := request.tool_choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in request.tools],
            "top_logprobs": request.top_logprobs,
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": self._usage_body() if is_finished else None,
            "user": request.user,
        }

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The response after an error."""
        reason = {"code": error.code or "server_error", "message": error.message}
        return {**self.body(), "status": "failed", "error": reason}

    @property
    def _status(self) -> str:
        if self._finish_reason is None:
            return "in_progress"
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _output(self) -> list[dict[str, Any]]:
        *before, last = self._items
        return [*(item.body("completed") for item in before), last.body(self._status)]

    def _usage_body(self) -> dict[str, Any]:
        usage = self._usage.body()
        reasoning = [item.text for item in self._items if isinstance(item, ReasoningItem)]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": sum(len(self._tokenizer.tokenize(text)) for text in reasoning)
            },
            "total_tokens": usage["total_tokens"],
        }
