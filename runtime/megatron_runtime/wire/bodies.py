"""What the body frames hold: a request on its way in, and a chunk of generated tokens on its way out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_runtime.wire.codec import MalformedMessage, is_list_of_integers, pack_body, unpack_body

Prompt = str | list[int]
TopLogProbs = list[dict[str, float]]


@dataclass
class TokenChunk:
    """Consecutive generated tokens of one request, with a log probability and a top-n dict for each if asked."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """As long as ``tokens``, or empty if nobody asked."""
    top_n_logprobs: TopLogProbs = field(default_factory=list)
    """As long as ``tokens``, or empty if nobody asked."""

    def extend(self, other: TokenChunk) -> None:
        """Append what came after."""
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
            MalformedMessage: Not three lists, or no list of token ids first.
        """
        if not isinstance(content, list) or len(content) != 3 or set(map(type, content)) != {list}:
            raise MalformedMessage("a chunk of tokens is no three lists")
        if not is_list_of_integers(content[0]):
            raise MalformedMessage("token ids are no integers")
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
    """A request as it travels: the prompt, the sampling parameters, and the tokens that were made for it already."""

    prompt: Prompt
    sampling_params: dict[str, Any]
    generated: TokenChunk = field(default_factory=TokenChunk)
    trace: dict[str, str] = field(default_factory=dict)
    """The context of the trace that it belongs to, as `tracing.carrier` has it."""

    def pack(self) -> bytes:
        """As a body frame.

        Raises:
            ValueError: Larger than a body may be.
        """
        return pack_body([self.prompt, self.sampling_params, self.generated.content(), self.trace])

    @classmethod
    def unpack(cls, body: bytes) -> RequestBody:
        """The inverse of `pack`.

        Raises:
            MalformedMessage: Not such a body.
        """
        content = unpack_body(body)
        if not isinstance(content, list) or len(content) != 4:
            raise MalformedMessage("request body is no list of 4 fields")
        prompt, sampling_params, generated, trace = content
        if not isinstance(prompt, str) and not is_list_of_integers(prompt):
            raise MalformedMessage("prompt is neither text nor token ids")
        if not isinstance(sampling_params, dict):
            raise MalformedMessage("sampling parameters are no map")
        if not isinstance(trace, dict) or not all(isinstance(word, str) for pair in trace.items() for word in pair):
            raise MalformedMessage("the trace's context is no map of texts")
        return cls(prompt, sampling_params, TokenChunk.from_content(generated), trace)
