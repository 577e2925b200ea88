"""``POST /v1/completions``: prompts as text or tokens, and their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.bodies.protocol import CompletionBody
from megatron_runtime.server.bodies.sampling import check_characters, check_tokens
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.generation.choice import Delta, TokenLogProb
from megatron_runtime.server.messages.conversation import with_bos
from megatron_runtime.server.openai.answer import Answer, AnswerChunks
from megatron_runtime.server.openai.token_ids import TokenIds


def completion_prompts(body: CompletionBody, tokenizer: Tokenizer, longest: int) -> list[list[int]]:
    """The tokens of every prompt. ``longest`` is the maximum length of prompt and answer in tokens."""
    prompts = [_tokens(prompt, tokenizer, body.add_bos, longest) for prompt in body.prompts]
    if not prompts or not all(prompts):
        raise ApiError(400, "prompt: must not be empty", param="prompt")
    return prompts


def completion(answer: Answer, deltas: Sequence[Delta], tokenizer: Tokenizer) -> dict[str, Any]:
    """The complete answer from the last delta of every choice."""
    ids = TokenIds(answer, tokenizer)

    def choice(delta: Delta) -> dict[str, Any]:
        logprobs = Logprobs(tokenizer)
        echo = _prompt_text(answer, delta.choice, tokenizer) if answer.body.is_echoed else ""
        prompt = answer.prompt_of(delta.choice) if _has_scored_prompt(answer) else []
        return {
            **_choice(delta, logprobs.body(delta.log_probs, delta.prompt_log_probs, prompt)),
            "text": echo + delta.text,
            **ids.of_prompt(delta.choice),
            **ids.of_piece(delta),
            **ids.of_whole(delta),
            **ids.of_routing(delta),
        }

    return answer.whole("text_completion", deltas, choice)


def completion_chunks(answer: Answer, tokenizer: Tokenizer) -> AnswerChunks:
    """The chunks of a stream: the prompt if ``echo`` is set, the text, then the usage."""
    logprobs = [Logprobs(tokenizer) for _ in range(answer.choices)]
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

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def body(
        self,
        entries: Sequence[TokenLogProb],
        of_prompt: Sequence[TokenLogProb] = (),
        prompt: Sequence[int] = (),
    ) -> dict[str, Any] | None:
        """The ``logprobs`` of one choice or chunk, after those of an echoed prompt, whose first token has none."""
        if not entries and not of_prompt and not prompt:
            return None
        known: list[TokenLogProb | None] = [*([None] if prompt else []), *of_prompt, *entries]
        ids = [*prompt[:1], *(entry.token for entry in (*of_prompt, *entries))]
        tokens = [self._tokenizer.detokenize([token], skip_special_tokens=False) for token in ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        has_tops = any(entry is not None and entry.top for entry in known)
        tops = [None if entry is None else dict(entry.top) for entry in known]
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else entry.log_prob for entry in known],
            "top_logprobs": tops if has_tops else None,
            "text_offset": offsets,
        }


def _tokens(prompt: str | list[int], tokenizer: Tokenizer, add_bos: bool | None, longest: int) -> list[int]:
    if isinstance(prompt, str):
        check_characters(prompt, tokenizer, longest, param="prompt")
        return with_bos(tokenizer.tokenize(prompt, add_special_tokens=True), add_bos, tokenizer)
    check_tokens(prompt, tokenizer.vocab_size, param="prompt")
    return prompt
