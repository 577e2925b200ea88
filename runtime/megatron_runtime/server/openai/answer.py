"""Common parts of all answers: metadata, order of choices, and usage."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.bodies.protocol import GenerationBody
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.generation.choice import Delta
from megatron_runtime.server.messages.message_format import ResponseParsing
from megatron_runtime.server.openai.streaming import Chunk
from megatron_runtime.server.openai.token_texts import TokenTexts


@dataclass(frozen=True)
class Answer:
    """One answer to one HTTP request; all chunks of a stream share it."""

    body: GenerationBody
    prompts: Sequence[Sequence[int]]
    id_prefix: str
    parsing: ResponseParsing = field(default_factory=ResponseParsing)
    number: str = field(default_factory=partial(secrets.token_hex, 16))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def choices(self) -> int:
        """Number of choices."""
        return len(self.prompts) * self.body.n

    def prompt_of(self, choice: int) -> list[int]:
        """The prompt of a choice."""
        return list(self.prompts[choice // self.body.n])

    def whole(self, kind: str, deltas: Sequence[Delta], choice: Callable[[Delta], dict[str, Any]]) -> dict[str, Any]:
        """The complete answer from the last delta of every choice; ``choice`` formats one choice."""
        usage = UsageMeter(self)
        for delta in deltas:
            usage.add(delta)
        choices = [choice(delta) for delta in sorted(deltas, key=lambda delta: delta.choice)]
        weights = _fingerprint(max((delta.weight_version for delta in deltas), default=0))
        return {**self.head(kind), "choices": choices, "usage": usage.body(), **weights}

    def token_texts(self, tokenizer: Tokenizer) -> TokenTexts:
        """How log probabilities describe tokens."""
        return TokenTexts(tokenizer, as_ids=self.body.return_tokens_as_token_ids)

    def head(self, kind: str) -> dict[str, Any]:
        """The metadata of the answer, in its body or in every chunk."""
        return {
            "id": f"{self.id_prefix}{self.number}",
            "object": kind,
            "created": self.created,
            "model": self.body.model,
        }


def _fingerprint(weight_version: int) -> dict[str, Any]:
    """The version of the weights, in OpenAI's field for the configuration of the backend."""
    return {"system_fingerprint": f"weights-{weight_version}"}


class UsageMeter:
    """Sums up the usage of an answer from its deltas."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._generated: dict[int, int] = {}
        self._cached: dict[int, int] = {}

    def add(self, delta: Delta) -> None:
        """Adds a delta."""
        known = self._generated.get(delta.choice, 0) + len(delta.tokens)
        self._generated[delta.choice] = known if delta.finish_reason is None else delta.generated_tokens
        if delta.finish_reason is not None:
            # A prompt is counted once for all its choices; tokens that any choice computed were not cached.
            prompt = delta.choice // self._answer.body.n
            self._cached[prompt] = min(self._cached.get(prompt, delta.cached_tokens), delta.cached_tokens)

    def body(self) -> dict[str, Any]:
        """The usage of all deltas so far, in the format of OpenAI's API."""
        prompt, generated = self._answer.prompt_tokens, sum(self._generated.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


class AnswerChunks:
    """The chunks of a stream: the openings, the pieces of every delta, and the usage if requested."""

    def __init__(
        self, answer: Answer, kind: str, pieces: Callable[[Delta], Iterable[Chunk]], openings: Iterable[Chunk]
    ) -> None:
        self._pieces = pieces
        self._openings = openings
        self._usage = UsageMeter(answer)
        self._include_usage = answer.body.include_usage
        self._is_continuous = answer.body.include_continuous_usage
        self._head = answer.head(kind) | ({"usage": None} if self._include_usage else {})

    def opening(self) -> Iterable[Chunk]:
        """See ``ChunkWriter``."""
        return [{**self._head, "choices": [opening], **self._usage_so_far()} for opening in self._openings]

    def delta(self, delta: Delta) -> Iterable[Chunk]:
        """See ``ChunkWriter``."""
        self._usage.add(delta)
        weights = {} if delta.finish_reason is None else _fingerprint(delta.weight_version)
        more = {**weights, **self._usage_so_far()}
        return [{**self._head, "choices": [piece], **more} for piece in self._pieces(delta)]

    def ending(self) -> Iterable[Chunk]:
        """See ``ChunkWriter``."""
        return [{**self._head, "choices": [], "usage": self._usage.body()}] if self._include_usage else []

    def failure(self, error: ApiError) -> Iterable[Chunk]:
        """See ``ChunkWriter``."""
        return [error.body()]

    def _usage_so_far(self) -> dict[str, Any]:
        return {"usage": self._usage.body()} if self._is_continuous else {}
