"""Grammars of calls and of reasoning agree with the parsers, with a real vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from megatron_runtime import guides
from megatron_runtime.call_format import CallFormat
from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.model.tokenizer import Tokenizer, load_tokenizer
from megatron_runtime.server.messages.tool_parsers.formats import TOOL_FORMATS

pytestmark = pytest.mark.model

CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/c"}}, "required": ["city"]}
FUNCTIONS: dict[str, Mapping[str, Any]] = {
    "weather": {**CITY, "additionalProperties": False, "$defs": {"c": {"enum": ["Paris", "Köln"]}}},
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
IMAGINED = "<|im_start|>"
"""A special token of the model, instead of a text mark."""


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


def lets_through(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    vocabulary = tokenizer.kept(
        "vocabulary of the tests", lambda: LLTokenizer(tokenizer.definition, eos_token=sorted(tokenizer.eos_token_ids))
    )
    matcher = LLMatcher(vocabulary, grammar)
    tokens = tokenizer.tokenize(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def written(form: CallFormat, *calls: tuple[str, Any]) -> str:
    objects = (json.dumps({"name": name, form.arguments: value}, ensure_ascii=False) for name, value in calls)
    return form.opening + form.separator.join(form.begin + text + form.end for text in objects) + form.closing


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
def test_only_calls_of_the_functions_with_arguments_of_their_schemas_pass(tokenizer: Tokenizer, name: str) -> None:
    form = TOOL_FORMATS[name].call_format
    assert form is not None
    one, several = (guides.calls_grammar(form, FUNCTIONS, several=several) for several in (False, True))
    good = ("weather", {"city": "Köln"})
    assert lets_through(tokenizer, one, written(form, good))
    assert lets_through(tokenizer, several, written(form, good, ("now", {}), good))
    assert not lets_through(tokenizer, one, written(form, good, good))
    for bad in (("weather", {"city": "Rome"}), ("weather", {}), ("now", {"a": 1}), ("time", {})):
        assert not lets_through(tokenizer, several, written(form, bad))
    assert not lets_through(tokenizer, several, "I see. " + written(form, good))


@pytest.mark.parametrize(
    ("form", "tokens"),
    [
        (TOOL_FORMATS["hermes"].call_format, {}),
        (TOOL_FORMATS["mistral"].call_format, {}),
        (CallFormat(begin=IMAGINED, end="|"), {IMAGINED: 1}),
        (CallFormat(opening=f"{IMAGINED}[", separator=", ", closing="]"), {IMAGINED: 1}),
    ],
)
def test_text_may_precede_calls_or_stand_alone(tokenizer: Tokenizer, form: CallFormat, tokens: dict[str, int]) -> None:
    assert tokens == tokenizer.special_tokens(tokens)
    grammar = guides.calls_grammar(form, FUNCTIONS, or_text=True, tokens=tokens)
    calls = written(form, ("weather", {"city": "Paris"}))
    for text in ("No call.\nAt all", calls, f"I see.\n{calls}"):
        assert lets_through(tokenizer, grammar, text), text
    assert not lets_through(tokenizer, grammar, "I see. " + written(form, ("weather", {"city": "Rome"})))
    assert not lets_through(tokenizer, grammar, calls[: len(calls) // 2])


@pytest.mark.parametrize(("begin", "end", "tokens"), [("<t>", "</t>", {}), (IMAGINED, "<repo_name>", None)])
def test_reasoning_is_unconstrained_and_the_answer_is_not(
    tokenizer: Tokenizer, begin: str, end: str, tokens: dict[str, int] | None
) -> None:
    marks = tokenizer.special_tokens([begin, end]) if tokens is None else tokens
    answer = guides.either_grammar(guides.json_schema_grammar(FUNCTIONS["weather"]), guides.lark_grammar('start: "no"'))
    for in_reasoning, opening in ((True, ""), (True, begin), (False, begin)):
        grammar = guides.after_reasoning_grammar(answer, begin=begin, end=end, in_reasoning=in_reasoning, tokens=marks)
        assert lets_through(tokenizer, grammar, opening + f'a {{}} "/" b{end}\n\n{{"city": "Paris"}}')
        assert lets_through(tokenizer, grammar, opening + f"{end}no")
        assert not lets_through(tokenizer, grammar, opening + f"a{end}yes")
        assert lets_through(tokenizer, grammar, "no") is not in_reasoning


def test_unsupported_parameter_schemas_are_refused_with_their_function() -> None:
    form = TOOL_FORMATS["hermes"].call_format
    assert form is not None
    with pytest.raises(InvalidRequestError, match=r"parameters of 'f'.*Invalid type"):
        guides.calls_grammar(form, {"f": {"type": "what"}})
