"""``POST /v1/chat/completions``: from messages to a prompt, and from deltas to the answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.answer import Answer
from megatron_runtime.server.choice import Delta, TokenLogProb
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.protocol import ChatCompletionBody


def chat_prompt(body: ChatCompletionBody, tokenizer: Tokenizer) -> list[int]:
    """The tokens of the conversation up to where the assistant's answer begins."""
    messages = [message.for_template() for message in body.messages]
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **body.chat_template_kwargs)
    except Exception as error:
        # The template is the checkpoint's own program; what it raises is its word on these messages.
        raise ApiError(400, f"messages: the model's chat template refuses them: {error}", param="messages") from error


def chat_completion(answer: Answer, deltas: Sequence[Delta], tokenizer: Tokenizer) -> dict[str, Any]:
    """The complete answer from the last delta of every choice."""

    def choice(delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.choice,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": _logprobs(delta.log_probs, tokenizer),
            "finish_reason": delta.finish_reason,
        }

    return answer.whole("chat.completion", deltas, choice)


def chat_chunks(
    answer: Answer, deltas: AsyncGenerator[Delta, None], tokenizer: Tokenizer, *, choices: int, include_usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a stream: the role of every choice, its text, its finish reason, at last the usage."""

    def pieces(delta: Delta) -> Iterator[dict[str, Any]]:
        if delta.text or delta.log_probs:
            yield _piece(delta.choice, {"content": delta.text}, _logprobs(delta.log_probs, tokenizer))
        if delta.finish_reason is not None:
            yield _piece(delta.choice, {}, finish_reason=delta.finish_reason)

    openings = [_piece(choice, {"role": "assistant", "content": ""}) for choice in range(choices)]
    return answer.chunks("chat.completion.chunk", deltas, pieces, openings=openings, include_usage=include_usage)


def _piece(
    index: int, delta: dict[str, str], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(entries: Sequence[TokenLogProb], tokenizer: Tokenizer) -> dict[str, Any] | None:
    if not entries:
        return None
    content = [
        {
            **_token(tokenizer.detokenize([entry.token], skip_special_tokens=False), entry.log_prob),
            "top_logprobs": [_token(text, value) for text, value in entry.top.items()],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _token(text: str, log_prob: float) -> dict[str, Any]:
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}
