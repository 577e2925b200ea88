"""``POST /v1/chat/completions``: converts deltas to the answer, complete or streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.bodies.protocol import ChatCompletionBody
from megatron_runtime.server.generation.choice import Delta, TokenLogProb
from megatron_runtime.server.messages.message import MessageBuilder
from megatron_runtime.server.messages.message_parts import joined
from megatron_runtime.server.openai.answer import Answer, AnswerChunks
from megatron_runtime.server.openai.token_ids import TokenIds
from megatron_runtime.server.openai.token_texts import TokenTexts


def chat_completion(answer: Answer, deltas: Sequence[Delta], tokenizer: Tokenizer) -> dict[str, Any]:
    """The complete answer from the last delta of every choice."""
    ids = TokenIds(answer, tokenizer)
    body, texts = _chat_body(answer), answer.token_texts(tokenizer)

    def choice(delta: Delta) -> dict[str, Any]:
        message = _Message(answer)
        message.add(delta)
        return {
            "index": delta.choice,
            "message": _echoing(body, message.builder.body()) | ids.of_whole(delta),
            "logprobs": chat_logprobs(delta.log_probs, texts),
            "finish_reason": message.builder.finish_reason(delta.finish_reason),
            "stop_reason": delta.stop_reason,
            **ids.of_piece(delta),
            **_prompt_scores(body, delta),
            **ids.of_routing(delta),
        }

    whole = answer.whole("chat.completion", deltas, choice) | ids.of_prompt(0)
    if body.prompt_logprobs is not None:
        whole["prompt_logprobs"] = texts.prompt_scores(deltas[0].prompt_log_probs, body.prompt_logprobs)
    return whole


def chat_chunks(answer: Answer, tokenizer: Tokenizer) -> AnswerChunks:
    """The chunks of a stream: for each choice the role, the parts and the finish reason; then the usage."""
    ids = TokenIds(answer, tokenizer)
    no_tokens = ids.of_piece(Delta(0, ""))
    messages = [_Message(answer) for _ in range(answer.choices)]
    body, texts = _chat_body(answer), answer.token_texts(tokenizer)

    def pieces(delta: Delta) -> Iterator[dict[str, Any]]:
        message = messages[delta.choice]
        new = ids.of_piece(delta) | _prompt_scores(body, delta)
        whole = ids.of_whole(delta)
        logprobs = chat_logprobs(delta.log_probs, texts)
        changes = message.add(delta)
        if not changes and (logprobs or delta.prompt_log_probs or new.get("token_ids")):
            changes = [message.nothing]
        for at, change in enumerate(changes):
            if at:
                logprobs, new = None, no_tokens
            yield _piece(delta.choice, change, logprobs) | new
        if delta.finish_reason is not None:
            reason = message.builder.finish_reason(delta.finish_reason)
            ending = {"stop_reason": delta.stop_reason, **ids.of_routing(delta)}
            yield _piece(delta.choice, whole, finish_reason=reason) | ending

    openings = [
        _piece(choice, {"role": "assistant", "content": body.echoed_message}) | ids.of_prompt(choice) | no_tokens
        for choice in range(answer.choices)
    ]
    return AnswerChunks(answer, "chat.completion.chunk", pieces, openings)


def _chat_body(answer: Answer) -> ChatCompletionBody:
    assert isinstance(answer.body, ChatCompletionBody)
    return answer.body


def _echoing(body: ChatCompletionBody, message: dict[str, Any]) -> dict[str, Any]:
    """The message after the one that the request repeats, if it does."""
    echoed = body.echoed_message
    return {**message, "content": echoed + (message["content"] or "")} if echoed else message


def _prompt_scores(body: ChatCompletionBody, delta: Delta) -> dict[str, Any]:
    """Log probabilities of the prompt's tokens from the second on, if the delta has them, in Megatron's field."""
    if body.skip_prompt_log_probs or not body.logprobs:
        return {}
    scores = [entry.log_prob for entry in delta.prompt_log_probs]
    return {"prompt_log_probs": scores} if scores else {}


class _Message:
    """The message of one choice, built from its deltas."""

    def __init__(self, answer: Answer) -> None:
        self._parser = None if answer.parsing.is_plain else answer.parsing.new_parser()
        self.builder = MessageBuilder(answer.parsing, shows_reasoning=_chat_body(answer).include_reasoning)
        self.nothing: dict[str, Any] = {"content": ""} if self._parser is None else {}
        """The ``delta`` of a chunk without content."""

    def add(self, delta: Delta) -> list[dict[str, Any]]:
        """Adds a delta; returns the ``delta`` of each chunk for it."""
        if self._parser is None:
            return self.builder.add_text(delta.text)
        parts = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            parts = joined([*parts, *self._parser.finish(is_cut=delta.finish_reason == "length")])
        return self.builder.add(parts)


def chat_logprobs(entries: Sequence[TokenLogProb], texts: TokenTexts) -> dict[str, Any] | None:
    """Log probabilities in the format of the chat endpoint; None if there are none."""
    return {"content": [texts.scored(entry) for entry in entries], "refusal": None} if entries else None


def _piece(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
