"""The bodies of ``POST /v1/embeddings`` and ``/v1/score``, with the fields of OpenAI's API and of vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megatron_runtime.sampling_params import LONGEST_SALT
from megatron_runtime.server.bodies.limits import MAX_INPUTS, FirstError, TokenIds
from megatron_runtime.server.bodies.null_fields import NullMeansAbsent
from megatron_runtime.server.bodies.only import Only
from megatron_runtime.server.bodies.sampling_fields import parameter
from megatron_runtime.server.bodies.vllm_fields import RequestId

Texts = str | Annotated[list[str], FirstError()]
PoolingInput = str | list[int]
"""A text, or its tokens."""
_SIDES = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))


class PoolingBody(NullMeansAbsent):
    """Fields that both endpoints have."""

    model: str
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] = "right"
    add_special_tokens: bool = True
    priority: int = parameter("priority")
    cache_salt: str | None = Field(None, min_length=1, max_length=LONGEST_SALT)
    timeout: float | None = Field(None, gt=0)
    request_id: RequestId | None = None
    user: str | None = None

    padding: Annotated[str, Only("do_not_pad")] = "do_not_pad"
    mm_processor_kwargs: Annotated[Any, Only(None, {})] = None


class EmbeddingsBody(PoolingBody):
    """``POST /v1/embeddings``."""

    input: str | TokenIds | Annotated[list[str], FirstError()] | Annotated[list[TokenIds], FirstError()]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    use_activation: bool = True
    """Whether embeddings are normalized; vLLM's name."""

    embed_dtype: Annotated[str, Only("float32")] = "float32"
    endianness: Annotated[str, Only("native", "little")] = "native"
    normalize: Annotated[bool, Only(True)] = True
    messages: Annotated[Any, Only(None)] = None

    @model_validator(mode="after")
    def _are_not_too_many(self) -> EmbeddingsBody:
        if len(self.inputs) > MAX_INPUTS:
            raise ValueError(f"input has {len(self.inputs)} entries; give at most {MAX_INPUTS}")
        return self

    @property
    def inputs(self) -> list[PoolingInput]:
        """The inputs as a list. A flat list of numbers is one input."""
        if isinstance(self.input, str):
            return [self.input]
        if self.input and isinstance(self.input[0], int):
            return [[token for token in self.input if isinstance(token, int)]]
        return [each for each in self.input if not isinstance(each, int)]


class ScoreBody(PoolingBody):
    """``POST /v1/score``: two sides, under one of four pairs of names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    instruction: Annotated[Any, Only(None, "")] = None
    chat_template_kwargs: Annotated[Any, Only(None, {})] = None
    max_tokens_per_query: Annotated[Any, Only(None, 0)] = None
    max_tokens_per_doc: Annotated[Any, Only(None, 0)] = None
    use_activation: Annotated[Any, Only(None, True)] = None

    @model_validator(mode="after")
    def _has_two_sides(self) -> ScoreBody:
        present = {name for pair in _SIDES for name in pair if getattr(self, name) is not None}
        if not any(present == set(pair) for pair in _SIDES):
            raise ValueError("queries and documents, or text_1 and text_2, must be set, and no other pair")
        first, second = (name for name, _ in self.sides)
        (_, one), (_, other) = self.sides
        for name, texts in self.sides:
            if not texts:
                raise ValueError(f"{name} must have at least one text")
        if len(one) not in (1, len(other)):
            raise ValueError(f"{first} has {len(one)} texts and {second} {len(other)}; give one, or as many")
        if len(one) + len(other) > MAX_INPUTS:
            raise ValueError(f"{second} has {len(other)} texts; give at most {MAX_INPUTS} on both sides together")
        return self

    @property
    def sides(self) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
        """The texts of both sides, each with the name of its field."""
        pair = next(pair for pair in _SIDES if all(getattr(self, name) is not None for name in pair))
        first, second = ((name, _as_list(getattr(self, name))) for name in pair)
        return first, second


def _as_list(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
