"""``POST /v1/completions``: prompts as text or tokens, and the answers to them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.answer import Answer
from megatron_runtime.server.choice import Delta, TokenLogProb
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.protocol import CompletionBody


def completion_prompts(body: CompletionBody, tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of every prompt."""
    prompts = [_tokens(prompt, tokenizer) for prompt in body.prompts]
    if not prompts or not all(prompts):
        raise ApiError(400, "prompt: must not be empty", param="prompt")
    return prompts


def completion(answer: Answer, deltas: Sequence[Delta], tokenizer: Tokenizer) -> dict[str, Any]:
    """The complete answer from the last delta of every choice."""
    return answer.whole("text_completion", deltas, lambda delta: _choice(delta, Logprobs(tokenizer)))


def completion_chunks(
    answer: Answer, deltas: AsyncGenerator[Delta, None], tokenizer: Tokenizer, *, choices: int, include_usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a stream: text as it comes, at last the usage."""
    logprobs = [Logprobs(tokenizer) for _ in range(choices)]
    return answer.chunks(
        "text_completion", deltas, lambda delta: [_choice(delta, logprobs[delta.choice])], include_usage=include_usage
    )


def _choice(delta: Delta, logprobs: Logprobs) -> dict[str, Any]:
    return {
        "index": delta.choice,
        "text": delta.text,
        "logprobs": logprobs.body(delta.log_probs),
        "finish_reason": delta.finish_reason,
    }


class Logprobs:
    """Log probabilities in the form of the completions endpoint; remembers how much text came before."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def body(self, entries: Sequence[TokenLogProb]) -> dict[str, Any] | None:
        """The ``logprobs`` of one choice or chunk."""
        if not entries:
            return None
        tokens = [self._tokenizer.detokenize([entry.token], skip_special_tokens=False) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.log_prob for entry in entries],
            "top_logprobs": [dict(entry.top) for entry in entries] if entries[0].top else None,
            "text_offset": offsets,
        }


def _tokens(prompt: str | list[int], tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.tokenize(prompt, add_special_tokens=True)
    for token in prompt:
        if token >= tokenizer.vocab_size:
            message = f"prompt: token {token} is outside the vocabulary of {tokenizer.vocab_size} tokens"
            raise ApiError(400, message, param="prompt")
    return prompt
