"""The contents of body frames: a request, and a chunk of generated tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_runtime.wire.codec import MalformedMessage, is_list_of_integers, pack_body, unpack_body

Prompt = str | list[int]
TopLogProbs = list[dict[str, float]]
KEPT_BY_CLIENT = (
    "stop_words",
    "bad_words",
    "stop_token_ids",
    "allowed_token_ids",
    "logit_bias",
    "grammar",
    "replayed_routing",
)
"""Sampling parameters that are not sent back with a result, because they may be large, and the client has them."""


@dataclass
class TokenChunk:
    """Consecutive generated tokens of one request, with a log probability and a top-n dict for each if requested."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """As long as ``tokens``, or empty if not requested."""
    top_n_logprobs: TopLogProbs = field(default_factory=list)
    """As long as ``tokens``, or empty if not requested."""

    def extend(self, other: TokenChunk) -> None:
        """Append the tokens that follow."""
        self.tokens += other.tokens
        self.log_probs += other.log_probs
        self.top_n_logprobs += other.top_n_logprobs

    def since(self, start: int, end: int | None = None) -> TokenChunk:
        """The part from token ``start`` to before ``end``."""
        return TokenChunk(self.tokens[start:end], self.log_probs[start:end], self.top_n_logprobs[start:end])

    def pack(self) -> bytes:
        """As a body frame."""
        return pack_body(self.content())

    def content(self) -> list[Any]:
        """As plain lists, for use inside a body frame."""
        return [self.tokens, self.log_probs, self.top_n_logprobs]

    @classmethod
    def from_content(cls, content: Any) -> TokenChunk:
        """The inverse of `content`.

        Raises:
            MalformedMessage: Not three lists, or the first one is not a list of token ids.
        """
        if not isinstance(content, list) or len(content) != 3 or set(map(type, content)) != {list}:
            raise MalformedMessage("a chunk of tokens is not three lists")
        if not is_list_of_integers(content[0]):
            raise MalformedMessage("token ids are not integers")
        return cls(*content)

    @classmethod
    def unpack(cls, body: bytes) -> TokenChunk:
        """The inverse of `pack`.

        Raises:
            MalformedMessage: As `from_content`, or not msgpack.
        """
        return cls.from_content(unpack_body(body))


@dataclass
class RequestBody:
    """A request in a message: the prompt, the sampling parameters, and the tokens generated so far."""

    prompt: Prompt
    sampling_params: dict[str, Any]
    generated: TokenChunk = field(default_factory=TokenChunk)
    trace: dict[str, str] = field(default_factory=dict)
    """The trace context, as `tracing.carrier` returns it."""

    def alone(self) -> RequestBody:
        """The body for one of the requests that share it: with tokens of its own."""
        return RequestBody(self.prompt, self.sampling_params, self.generated.since(0), self.trace)

    def pack(self) -> bytes:
        """As a body frame.

        Raises:
            ValueError: Larger than MAX_BODY_BYTES.
        """
        return pack_body([self.prompt, self.sampling_params, self.generated.content(), self.trace])

    @classmethod
    def unpack(cls, body: bytes) -> RequestBody:
        """The inverse of `pack`.

        Raises:
            MalformedMessage: The body is invalid.
        """
        content = unpack_body(body)
        if not isinstance(content, list) or len(content) != 4:
            raise MalformedMessage("request body is not a list of 4 fields")
        prompt, sampling_params, generated, trace = content
        if not isinstance(prompt, str) and not is_list_of_integers(prompt):
            raise MalformedMessage("prompt is neither text nor token ids")
        if not isinstance(sampling_params, dict):
            raise MalformedMessage("sampling parameters are not a map")
        if not isinstance(trace, dict) or not all(isinstance(word, str) for pair in trace.items() for word in pair):
            raise MalformedMessage("the trace context is not a map of strings")
        return cls(prompt, sampling_params, TokenChunk.from_content(generated), trace)
