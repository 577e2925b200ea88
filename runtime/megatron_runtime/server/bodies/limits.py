"""Limits of the fields of request bodies, beyond which a request would cost other clients their time.

Lists end at their first invalid item: a message about each of a million items takes minutes and a gigabyte.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, FailFast, Field
from pydantic_core import PydanticCustomError

from megatron_runtime.guide_limits import MAX_EXPRESSION_CHARACTERS
from megatron_runtime.sampling_params import MOST_BAD_CHARACTERS
from megatron_runtime.server.known_fields import JsonAtMost, checked_size

MAX_STOP_STRINGS = 256
MAX_STOP_CHARACTERS = 16_384
"""All stop strings of a request together."""
MAX_BAD_WORDS = 1000
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024
MAX_ALLOWED_TOKENS = 65_536
MAX_COPIED_TOKENS = 262_144
"""Tokens of ``allowed_token_ids``, and of ``logit_bias``, times the number of choices."""
MAX_TOOLS = 512
MAX_MESSAGES = 8192
MAX_PARTS = 1024
"""Parts of one message."""
MAX_CHOICES = 128
"""Choices (prompts x n) of one request."""
MAX_INPUTS = 2048
"""Inputs of one request for embeddings or scores; OpenAI's limit."""
MAX_GUIDED_CHOICES = 4096
MAX_GRAMMAR_CHARACTERS = MAX_EXPRESSION_CHARACTERS
"""A regular expression or a grammar."""
MAX_TEMPLATE_CHARACTERS = 65_536
MAX_SCHEMA_CHARACTERS = 262_144
"""A JSON schema as text."""
LONGEST_BAD_WORD = 1024
LONGEST_IDENTIFIER = 1024
"""Of fields that name a user or a cache and have no effect; OpenAI's limits are 64 to 512 characters."""
MAX_METADATA_CHARACTERS = 65_536
"""As JSON; OpenAI's limit is 16 pairs of 64 and 512 characters."""


class FirstError(FailFast):
    """pydantic's FailFast, which unions can't contain because it is not hashable."""

    __hash__ = object.__hash__


def at_most(limit: int) -> BeforeValidator:
    """Check the number of entries before any of them."""

    def check(value: Any) -> Any:
        if isinstance(value, Sized) and not isinstance(value, str) and len(value) > limit:
            message = "has {count} entries; give at most {limit}"
            raise PydanticCustomError("too_many", message, {"count": len(value), "limit": limit})
        return value

    return BeforeValidator(check)


def _characters_at_most(limit: int) -> BeforeValidator:
    """Check the number of characters of all texts together."""

    def check(value: Any) -> Any:
        texts = value if isinstance(value, list) else [value]
        return checked_size(value, sum(len(text) for text in texts if isinstance(text, str)), limit)

    return BeforeValidator(check)


StopString = Annotated[str, Field(min_length=1)]
Stop = Annotated[
    StopString | Annotated[list[StopString], FirstError()],
    _characters_at_most(MAX_STOP_CHARACTERS),
    at_most(MAX_STOP_STRINGS),
]
BadWord = Annotated[str, Field(max_length=LONGEST_BAD_WORD)]
BadWords = Annotated[
    list[BadWord],
    Field(max_length=MAX_BAD_WORDS),
    FirstError(),
    _characters_at_most(MOST_BAD_CHARACTERS),
]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], FirstError()]
StopTokens = Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS), FirstError()]
AllowedTokens = Annotated[
    list[TokenId],
    Field(max_length=MAX_ALLOWED_TOKENS),
    FirstError(),
    AfterValidator(lambda tokens: list(dict.fromkeys(tokens))),
]
"""Each token once, in the order of the request."""
Biases = Annotated[dict[str, float], at_most(MAX_BIASES)]
GuidedText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
GuidedChoices = Annotated[list[GuidedText], Field(min_length=1, max_length=MAX_GUIDED_CHOICES), FirstError()]
Schema = Annotated[dict[str, Any], JsonAtMost(MAX_SCHEMA_CHARACTERS)]
GuidedJson = Annotated[str | dict[str, Any], JsonAtMost(MAX_SCHEMA_CHARACTERS)]
Identifier = Annotated[str, _characters_at_most(LONGEST_IDENTIFIER)]
Metadata = Annotated[dict[str, Any], JsonAtMost(MAX_METADATA_CHARACTERS)]
