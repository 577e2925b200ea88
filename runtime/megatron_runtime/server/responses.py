"""``POST /v1/responses``: from deltas to a response, whole or as the events that build it up."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.answer import Answer, UsageMeter
from megatron_runtime.server.chat import token_logprob
from megatron_runtime.server.choice import Delta, TokenLogProb
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.responses_protocol import ResponsesBody


def response(answer: Answer, deltas: Sequence[Delta], tokenizer: Tokenizer) -> dict[str, Any]:
    """The complete response from the only delta of its only choice."""
    builder = _Response(answer, tokenizer)
    (delta,) = deltas
    builder.add(delta)
    return builder.body()


async def response_events(
    answer: Answer, deltas: AsyncGenerator[Delta, None], tokenizer: Tokenizer
) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a stream, numbered; the last one has the complete response, or says why there is none."""
    number = 0

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        nonlocal number
        number += 1
        return {"type": kind, "sequence_number": number - 1, **fields}

    builder = _Response(answer, tokenizer)
    place = {"item_id": builder.item_id, "output_index": 0, "content_index": 0}
    async with aclosing(deltas):
        yield event("response.created", response=builder.body())
        yield event("response.in_progress", response=builder.body())
        yield event("response.output_item.added", output_index=0, item=builder.item(is_empty=True))
        yield event("response.content_part.added", **place, part=builder.part(is_empty=True))
        try:
            async for delta in deltas:
                builder.add(delta)
                if delta.text or delta.log_probs:
                    logprobs = [token_logprob(entry, tokenizer) for entry in delta.log_probs]
                    yield event("response.output_text.delta", **place, delta=delta.text, logprobs=logprobs)
        except ApiError as error:
            yield event("response.failed", response=builder.failed(error))
            return
    part = builder.part()
    yield event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"])
    yield event("response.content_part.done", **place, part=part)
    yield event("response.output_item.done", output_index=0, item=builder.item())
    body = builder.body()
    yield event(f"response.{body['status']}", response=body)


class _Response:
    """A response that grows by deltas."""

    def __init__(self, answer: Answer, tokenizer: Tokenizer) -> None:
        assert isinstance(answer.body, ResponsesBody)
        self._request = answer.body
        self._answer = answer
        self._tokenizer = tokenizer
        self.item_id = f"msg_{answer.number}"
        self._text = ""
        self._log_probs: list[TokenLogProb] = []
        self._usage = UsageMeter(answer)
        self._finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        """Take the next delta."""
        self._text += delta.text
        self._log_probs += delta.log_probs
        self._usage.add(delta)
        self._finish_reason = delta.finish_reason

    def part(self, *, is_empty: bool = False) -> dict[str, Any]:
        """The text as content of the message."""
        logprobs = [token_logprob(entry, self._tokenizer) for entry in self._log_probs]
        text = {"text": "", "logprobs": []} if is_empty else {"text": self._text, "logprobs": logprobs}
        return {"type": "output_text", "annotations": [], **text}

    def item(self, *, is_empty: bool = False) -> dict[str, Any]:
        """The message."""
        content = [] if is_empty else [self.part()]
        return {
            "type": "message",
            "id": self.item_id,
            "role": "assistant",
            "status": self._status,
            "content": content,
        }

    def body(self) -> dict[str, Any]:
        """The whole response as far as it is."""
        request = self._request
        is_over = self._finish_reason is not None
        return {
            "id": f"resp_{self._answer.number}",
            "object": "response",
            "created_at": self._answer.created,
            "status": self._status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": [self.item()] if is_over else [],
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": {"format": request.text.format.model_dump(exclude_none=True)},
            "tool_choice": request.tool_choice,
            "tools": [],
            "top_logprobs": request.top_logprobs,
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": self._usage_body() if is_over else None,
            "user": request.user,
        }

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The response that there will not be."""
        reason = {"code": error.code or "server_error", "message": error.message}
        return {**self.body(), "status": "failed", "error": reason}

    @property
    def _status(self) -> str:
        if self._finish_reason is None:
            return "in_progress"
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _usage_body(self) -> dict[str, Any]:
        usage = self._usage.body()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
