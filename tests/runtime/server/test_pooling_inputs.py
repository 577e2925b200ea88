"""The tokens of inputs for embeddings, with a tokenizer that puts special tokens around a text."""

from __future__ import annotations

from typing import Any

import pytest
from runtime_support.byte_backend import END, END_TEXT, byte_backend
from tokenizers.processors import TemplateProcessing

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.server.bodies.pooling_protocol import EmbeddingsBody
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.openai.pooling import input_tokens

BEGIN, LONGEST = 257, 12


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = byte_backend(["<begin>"])
    backend.post_processor = TemplateProcessing(
        single=f"<begin> $A {END_TEXT}", special_tokens=[("<begin>", BEGIN), (END_TEXT, END)]
    )
    return Tokenizer(backend, location="bytes", eod=END)


def tokens_of(tokenizer: Tokenizer, value: Any, **fields: Any) -> list[int]:
    body = EmbeddingsBody.model_validate({"model": "m", "input": value, **fields})
    return input_tokens("input", value, body, tokenizer, LONGEST)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, "abcdef"),
        ({"truncate_prompt_tokens": 5}, "abc"),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, "def"),
        ({"truncate_prompt_tokens": 8}, "abcdef"),
        ({"truncate_prompt_tokens": -1}, "abcdef"),
    ],
)
def test_a_truncated_text_keeps_its_special_tokens(tokenizer: Tokenizer, fields: dict[str, Any], kept: str) -> None:
    assert tokens_of(tokenizer, "abcdef", **fields) == [BEGIN, *kept.encode(), END]


def test_tokens_and_texts_without_special_tokens_are_truncated_alone(tokenizer: Tokenizer) -> None:
    assert tokens_of(tokenizer, [1, 2, 3, 4], truncate_prompt_tokens=3) == [1, 2, 3]
    assert tokens_of(tokenizer, [1, 2, 3, 4], truncate_prompt_tokens=3, truncation_side="left") == [2, 3, 4]
    assert tokens_of(tokenizer, "abcd", add_special_tokens=False, truncate_prompt_tokens=2) == [97, 98]
    assert tokens_of(tokenizer, "abc" * 9, truncate_prompt_tokens=-1) == [BEGIN, *b"abcabcabca", END]


def test_a_truncation_to_special_tokens_alone_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ApiError, match="2 leaves no token of the text beside 2 special ones; increase it") as error:
        tokens_of(tokenizer, "abc", truncate_prompt_tokens=2)
    assert (error.value.status, error.value.param) == (400, "truncate_prompt_tokens")
    with pytest.raises(ApiError, match="maximum context length is 12 tokens"):
        tokens_of(tokenizer, "a" * 11)
