"""Bodies that would cost other clients their time are refused before any work on them."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock

import pytest
from pydantic import ValidationError

from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.guides import json_schema_grammar
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import MOST_BAD_CHARACTERS
from megatron_runtime.server.bodies import limits
from megatron_runtime.server.bodies.protocol import ChatCompletionBody, CompletionBody
from megatron_runtime.server.bodies.responses_protocol import ResponsesBody
from megatron_runtime.server.bodies.sampling import check_copies
from megatron_runtime.server.body_route import MAX_COPIED_BYTES, MAX_VALUES, _check_copies, _content
from megatron_runtime.server.errors import ApiError, _from_validation
from megatron_runtime.server.known_fields import KnownFields
from megatron_runtime.server.openai.completions import completion_prompts

Body = type[CompletionBody] | type[ChatCompletionBody] | type[ResponsesBody]
FUNCTION = {"type": "function", "function": {"name": "f"}}


def refusal(fields: Mapping[str, Any], body: Body = CompletionBody) -> ApiError:
    needed: dict[Any, dict[str, Any]] = {
        CompletionBody: {"prompt": "x"},
        ChatCompletionBody: {"messages": [{"role": "user", "content": "x"}]},
        ResponsesBody: {"input": "x"},
    }
    with pytest.raises(ValidationError) as refused:
        body.model_validate({"model": "m", **needed[body], **fields})
    errors = refused.value.errors(include_url=False)
    assert len(errors) < 10
    return _from_validation(errors)


@pytest.mark.parametrize(
    ("body", "fields", "param", "limit"),
    [
        (CompletionBody, {"stop": ["x"] * 257}, "stop", limits.MAX_STOP_STRINGS),
        (CompletionBody, {"stop": ["x" * 9000] * 2}, "stop", limits.MAX_STOP_CHARACTERS),
        (CompletionBody, {"stop": "x" * 20_000}, "stop", limits.MAX_STOP_CHARACTERS),
        (CompletionBody, {"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", limits.MAX_BIASES),
        (CompletionBody, {"stop_token_ids": [1] * 1025}, "stop_token_ids", limits.MAX_STOP_TOKENS),
        (CompletionBody, {"allowed_token_ids": [1] * 65_537}, "allowed_token_ids", limits.MAX_ALLOWED_TOKENS),
        (CompletionBody, {"bad_words": ["x"] * 1001}, "bad_words", limits.MAX_BAD_WORDS),
        (CompletionBody, {"bad_words": ["x" * 1000] * 17}, "bad_words", MOST_BAD_CHARACTERS),
        (CompletionBody, {"guided_regex": "x" * 70_000}, "guided_regex", limits.MAX_GRAMMAR_CHARACTERS),
        (CompletionBody, {"guided_choice": ["x"] * 4097}, "guided_choice", limits.MAX_GUIDED_CHOICES),
        (CompletionBody, {"guided_json": {"x": "y" * 300_000}}, "guided_json", limits.MAX_SCHEMA_CHARACTERS),
        (
            CompletionBody,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"x": "y" * 300_000}}}},
            "response_format.json_schema.schema",
            limits.MAX_SCHEMA_CHARACTERS,
        ),
        (CompletionBody, {"user": "x" * 1025}, "user", limits.LONGEST_IDENTIFIER),
        (ChatCompletionBody, {"safety_identifier": "x" * 1025}, "safety_identifier", limits.LONGEST_IDENTIFIER),
        (ResponsesBody, {"prompt_cache_key": "x" * 1025}, "prompt_cache_key", limits.LONGEST_IDENTIFIER),
        (ResponsesBody, {"service_tier": "x" * 1025}, "service_tier", limits.LONGEST_IDENTIFIER),
        (CompletionBody, {"metadata": {"x": "y" * 70_000}}, "metadata", limits.MAX_METADATA_CHARACTERS),
        (ChatCompletionBody, {"tools": [FUNCTION] * 513}, "tools", limits.MAX_TOOLS),
        (
            ChatCompletionBody,
            {"messages": [{"role": "user", "content": "x"}] * 8193},
            "messages",
            limits.MAX_MESSAGES,
        ),
        (ResponsesBody, {"input": [{"role": "user", "content": "x"}] * 8193}, "input", limits.MAX_MESSAGES),
    ],
)
def test_a_field_beyond_its_limit_is_refused_with_the_limit(
    body: Body, fields: Mapping[str, Any], param: str, limit: int
) -> None:
    error = refusal(fields, body)
    assert error.param == param
    assert str(limit) in str(error)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [{}] * 200_000},
        {"prompt": [[{}]] * 200_000},
        {"stop": [1] * 200_000},
        {"logit_bias": dict.fromkeys(map(str, range(200_000)), "x")},
        {"stop_token_ids": ["x"] * 200_000},
    ],
    ids=["prompts", "tokenized prompts", "stop", "logit_bias", "stop_token_ids"],
)
def test_many_invalid_items_cost_as_little_as_one(fields: dict[str, Any]) -> None:
    """A message about each of them took 40 seconds and 600 MiB."""
    tracemalloc.start()
    try:
        refusal(fields)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20


def test_a_body_of_too_many_values_is_refused_before_it_is_parsed() -> None:
    _content(b"[1" + b",1" * MAX_VALUES + b"]", KnownFields(CompletionBody))
    with pytest.raises(ApiError, match=f"at most {MAX_VALUES}"):
        _content(b"[1,1" + b",1" * MAX_VALUES + b"]", KnownFields(CompletionBody))


@pytest.mark.parametrize("item", [b"{}", b"[]", b'{"a":1}', b'{"a":[]}', b'"a",{}', b'"\\"{\\\\",{}'])
def test_a_body_of_too_many_objects_is_refused_before_it_is_parsed(item: bytes) -> None:
    """300,000 of them took 22 to 25 times the memory of the body."""
    raw = b'{"prompt":[' + b",".join([item] * 150_000) + b"]}"
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match=r"has (150|300)002 objects and lists in \d+ bytes; send at most"):
            _content(raw, KnownFields(CompletionBody))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(raw)


def test_objects_in_texts_and_in_long_bodies_are_accepted() -> None:
    text = json.dumps([{"a": ["b\\", {}]}] * 100_000)
    assert _content(json.dumps({"prompt": text}).encode(), KnownFields(CompletionBody))["prompt"] == text
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}] * 30_000
    body = json.dumps({"messages": messages}).encode()
    assert len(_content(body, KnownFields(ChatCompletionBody))["messages"]) == len(messages)


def test_many_tools_of_different_names_are_accepted() -> None:
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(limits.MAX_TOOLS)]
    body = ChatCompletionBody.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools}
    )
    assert len(body.tool_use.functions) == limits.MAX_TOOLS
    error = refusal({"tools": [*tools[:-1], tools[0]]}, ChatCompletionBody)
    assert "two functions named 'f0'" in str(error)


@pytest.mark.parametrize("field", ["bad_words", "stop", "guided_choice"])
def test_a_lone_surrogate_is_refused_by_its_field(field: str) -> None:
    assert str(refusal({field: ["\ud800"]}).param).startswith(field)


@pytest.mark.parametrize("schema", [{"const": 10**30}, '{"const": 1000000000000000000000000000000}'])
def test_a_number_beyond_64_bits_in_a_schema_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequestError, match="can't be converted"):
        json_schema_grammar(schema)


def test_a_lone_surrogate_in_a_schema_is_refused() -> None:
    assert refusal({"guided_json": {"const": "\ud800"}}).param == "guided_json"


def test_the_copies_of_a_body_are_limited() -> None:
    _check_copies(128, MAX_COPIED_BYTES // 128)
    with pytest.raises(ApiError, match="n: 128 choices of a body of 1000000 bytes exceed"):
        _check_copies(128, 1_000_000)


@pytest.mark.parametrize("field", ["allowed_token_ids", "logit_bias"])
def test_the_tokens_of_all_choices_together_are_limited(field: str) -> None:
    tokens = range(1000)
    given = {"allowed_token_ids": [*tokens, *tokens], "logit_bias": {str(token): 1 for token in tokens}}[field]
    body = CompletionBody.model_validate({"model": "m", "prompt": "x", "n": 128, field: given})
    check_copies(body, limits.MAX_COPIED_TOKENS // len(tokens))
    with pytest.raises(ApiError, match=f"{field}: 1000 tokens for each of 263 choices exceed 262144") as refused:
        check_copies(body, limits.MAX_COPIED_TOKENS // len(tokens) + 1)
    assert refused.value.param == field


def test_too_many_prompts_are_refused_before_they_are_tokenized() -> None:
    """Texts of three letters in a body of 2.5 MB kept all other large bodies waiting for many seconds."""
    body = CompletionBody.model_validate({"model": "m", "prompt": ["x"] * 43, "n": 3})
    tokenizer = Mock(spec=Tokenizer)
    with pytest.raises(ApiError, match="n: 43 prompts times 3 exceed the limit of 128 answers; reduce n"):
        completion_prompts(body, tokenizer, 100)
    tokenizer.tokenize.assert_not_called()
