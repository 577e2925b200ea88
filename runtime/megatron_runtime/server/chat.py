"""``POST /v1/chat/completions``: from messages to a prompt, and from deltas to the answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.answer import Answer
from megatron_runtime.server.choice import Delta, TokenLogProb
from megatron_runtime.server.token_ids import TokenIds


def chat_completion(answer: Answer, deltas: Sequence[Delta], tokenizer: Tokenizer) -> dict[str, Any]:
    """The complete answer from the last delta of every choice."""
    ids = TokenIds(answer)

    def choice(delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.choice,
            "message": {"role": "assistant", "content": delta.text, "refusal": None, **ids.of_whole(delta)},
            "logprobs": chat_logprobs(delta.log_probs, tokenizer),
            "finish_reason": delta.finish_reason,
            **ids.of_piece(delta),
        }

    return answer.whole("chat.completion", deltas, choice) | ids.of_prompt(0)


def chat_chunks(
    answer: Answer, deltas: AsyncGenerator[Delta, None], tokenizer: Tokenizer
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a stream: the role of every choice, its text, its finish reason, at last the usage."""
    ids = TokenIds(answer)

    def pieces(delta: Delta) -> Iterator[dict[str, Any]]:
        new = ids.of_piece(delta)
        whole = ids.of_whole(delta)
        if delta.text or delta.log_probs or new.get("token_ids"):
            logprobs = chat_logprobs(delta.log_probs, tokenizer)
            yield _piece(delta.choice, {"content": delta.text}, logprobs) | new
        if delta.finish_reason is not None:
            yield _piece(delta.choice, whole, finish_reason=delta.finish_reason)

    openings = [
        _piece(choice, {"role": "assistant", "content": ""}) | ids.of_prompt(choice) | ids.of_piece(Delta(choice, ""))
        for choice in range(answer.choices)
    ]
    return answer.chunks("chat.completion.chunk", deltas, pieces, openings=openings)


def chat_logprobs(entries: Sequence[TokenLogProb], tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Log probabilities in the form of the chat endpoint; None for none."""
    if not entries:
        return None
    return {"content": [token_logprob(entry, tokenizer) for entry in entries], "refusal": None}


def token_logprob(entry: TokenLogProb, tokenizer: Tokenizer) -> dict[str, Any]:
    """A token with its log probability, its bytes, and those that were likeliest in its place."""
    text = tokenizer.detokenize([entry.token], skip_special_tokens=False)
    return {
        **_token(text, entry.log_prob),
        "top_logprobs": [_token(text, value) for text, value in entry.top.items()],
    }


def _piece(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _token(text: str, log_prob: float) -> dict[str, Any]:
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}
