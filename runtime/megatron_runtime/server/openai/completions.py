"""``POST /v1/completions``: prompts as text or tokens, and their answers."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.bodies.protocol import CompletionBody
from megatron_runtime.server.bodies.sampling import (
    check_characters,
    check_choices,
    check_tokens,
    check_truncatable,
    truncated,
)
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.generation.choice import Delta, TokenLogProb
from megatron_runtime.server.messages.conversation import with_bos
from megatron_runtime.server.openai.answer import Answer, AnswerChunks
from megatron_runtime.server.openai.token_ids import TokenIds


def completion_prompts(body: CompletionBody, tokenizer: Tokenizer, longest: int) -> list[list[int]]:
    """The tokens of every prompt. ``longest`` is the maximum length of prompt and answer in tokens."""
    texts = body.prompts
    check_choices(body, len(texts))
    prompts = [truncated(_tokens(prompt, tokenizer, body, longest), body, longest) for prompt in texts]
    if not prompts or not all(prompts):
        raise ApiError(400, "prompt: must not be empty", param="prompt")
    return prompts


def completion(answer: Answer, deltas: Sequence[Delta], tokenizer: Tokenizer) -> dict[str, Any]:
    """The complete answer from the last delta of every choice."""
    ids = TokenIds(answer, tokenizer)

    def choice(delta: Delta) -> dict[str, Any]:
        logprobs = Logprobs(answer, tokenizer)
        echo = _prompt_text(answer, delta.choice, tokenizer) if answer.body.is_echoed else ""
        prompt = answer.prompt_of(delta.choice) if _has_scored_prompt(answer) else []
        return {
            **_choice(delta, logprobs.body(delta.log_probs, delta.prompt_log_probs if prompt else (), prompt)),
            "text": echo + delta.text,
            "stop_reason": delta.stop_reason,
            **logprobs.of_prompt(delta),
            **ids.of_prompt(delta.choice),
            **ids.of_piece(delta),
            **ids.of_whole(delta),
            **ids.of_routing(delta),
        }

    return answer.whole("text_completion", deltas, choice)


def completion_chunks(answer: Answer, tokenizer: Tokenizer) -> AnswerChunks:
    """The chunks of a stream: the prompt if ``echo`` is set, the text, then the usage."""
    logprobs = [Logprobs(answer, tokenizer) for _ in range(answer.choices)]
    ids = TokenIds(answer, tokenizer)

    is_scored = _has_scored_prompt(answer)
    opened: set[int] = set()

    def piece(delta: Delta) -> dict[str, Any]:
        if is_scored and delta.choice not in opened:
            opened.add(delta.choice)
            delta = delta._replace(text=_prompt_text(answer, delta.choice, tokenizer))
            return _choice(
                delta, logprobs[delta.choice].body((), delta.prompt_log_probs, answer.prompt_of(delta.choice))
            )
        new = _choice(delta, logprobs[delta.choice].body(delta.log_probs))
        if delta.finish_reason is not None:
            new["stop_reason"] = delta.stop_reason
        return {**new, **ids.of_piece(delta), **ids.of_whole(delta), **ids.of_routing(delta)}

    def opening(choice: int) -> dict[str, Any]:
        echo = _prompt_text(answer, choice, tokenizer) if answer.body.is_echoed and not is_scored else ""
        delta = Delta(choice, echo)
        return {**_choice(delta, None), **ids.of_prompt(choice), **ids.of_piece(delta)}

    is_announced = (answer.body.is_echoed and not is_scored) or answer.body.return_token_ids
    openings = [opening(choice) for choice in range(answer.choices)] if is_announced else []
    return AnswerChunks(answer, "text_completion", lambda delta: [piece(delta)], openings)


def _has_scored_prompt(answer: Answer) -> bool:
    return answer.body.is_echoed and answer.body.top_n_log_probs is not None


def _prompt_text(answer: Answer, choice: int, tokenizer: Tokenizer) -> str:
    """The prompt as the client sent it, or the text of its tokens."""
    assert isinstance(answer.body, CompletionBody)
    prompt = answer.body.prompts[choice // answer.body.n]
    return prompt if isinstance(prompt, str) else tokenizer.detokenize(prompt, skip_special_tokens=False)


def _choice(delta: Delta, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "index": delta.choice,
        "text": delta.text,
        "logprobs": logprobs,
        "finish_reason": delta.finish_reason,
    }


class Logprobs:
    """Log probabilities in the format of the completions endpoint; tracks the text offset."""

    def __init__(self, answer: Answer, tokenizer: Tokenizer) -> None:
        self._body = answer.body
        self._texts = answer.token_texts(tokenizer)
        self._drops_first_space = tokenizer.drops_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def of_prompt(self, delta: Delta) -> dict[str, Any]:
        """vLLM's ``prompt_logprobs``, if the request has the field."""
        count = self._body.prompt_logprobs
        return {} if count is None else {"prompt_logprobs": self._texts.prompt_scores(delta.prompt_log_probs, count)}

    def body(
        self,
        entries: Sequence[TokenLogProb],
        of_prompt: Sequence[TokenLogProb] = (),
        prompt: Sequence[int] = (),
    ) -> dict[str, Any] | None:
        """The ``logprobs`` of one choice or chunk, after those of an echoed prompt, whose first token has none."""
        if not entries and not of_prompt and not prompt:
            return None
        limited = [entry.limited(self._body.top_n_log_probs or 0) for entry in (*of_prompt, *entries)]
        known: list[TokenLogProb | None] = [*([None] if prompt else []), *limited]
        ids = [(token, self._drops_first_space) for token in prompt[:1]]
        ids += [(entry.token, entry.begins_text and not prompt) for entry in limited]
        tops = [None if entry is None else self._texts.by_text(entry) for entry in known]
        return {
            "tokens": [self._texts.text(token, begins_text=begins) for token, begins in ids],
            "token_logprobs": [None if entry is None else entry.log_prob for entry in known],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [self._advance(self._texts.data(token, begins_text=begins)) for token, begins in ids],
        }

    def _advance(self, data: bytes) -> int:
        """The offset of a token in the text, in characters; those of an incomplete character have its offset."""
        start = self._offset
        self._offset += len(self._decoder.decode(data))
        return start


def _tokens(prompt: str | list[int], tokenizer: Tokenizer, body: CompletionBody, longest: int) -> list[int]:
    if isinstance(prompt, str):
        if body.truncate_prompt_tokens is None:
            check_characters(prompt, tokenizer, longest, param="prompt")
        else:
            check_truncatable(prompt, param="prompt")
        adds_special = body.add_special_tokens is not False
        return with_bos(tokenizer.tokenize(prompt, add_special_tokens=adds_special), body.add_bos, tokenizer)
    check_tokens(prompt, tokenizer.vocab_size, param="prompt")
    return prompt
