"""Grammars of calls and of reasoning agree with the parsers, with a real vocabulary."""

from __future__ import annotations

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
    return form.text(calls)


@pytest.mark.parametrize("name", [name for name, form in TOOL_FORMATS.items() if not form.call_format.is_single])
def test_only_calls_of_the_functions_with_arguments_of_their_schemas_pass(tokenizer: Tokenizer, name: str) -> None:
    form = TOOL_FORMATS[name].call_format
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
        *((form.call_format, {}) for form in TOOL_FORMATS.values() if form.call_format.has_marker),
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
    with pytest.raises(InvalidRequestError, match=r"parameters of 'f'.*Invalid type"):
        guides.calls_grammar(form, {"f": {"type": "what"}})


VALUES: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["K", "C"]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "word": {"type": "string", "minLength": 2, "maxLength": 3},
        "n": {"$ref": "#/$defs/n"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "n"],
    "$defs": {"n": {"type": "integer", "minimum": 1}},
}
GOOD: tuple[dict[str, Any], ...] = (
    {"city": "Köln\n<b> & so", "n": 3},
    {"city": "", "unit": "C", "code": "DE", "word": "abc", "n": 1, "tags": ["a", "b"]},
    {"city": "x", "word": "ab", "n": 12},
)
BAD: tuple[dict[str, Any], ...] = (
    {"city": "x"},
    {"n": 3},
    {"city": "x", "n": 0},
    {"city": "x", "n": "many"},
    {"city": "x", "unit": "F", "n": 3},
    {"city": "x", "code": "de", "n": 3},
    {"city": "x", "word": "abcd", "n": 3},
    {"city": "x", "n": 3, "more": 1},
)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_arguments_of_every_format_match_their_schemas(tokenizer: Tokenizer, name: str) -> None:
    form = TOOL_FORMATS[name].call_format
    grammar = guides.calls_grammar(form, {"w": VALUES}, several=False)
    for arguments in GOOD:
        assert lets_through(tokenizer, grammar, written(form, ("w", arguments))), arguments
    for arguments in BAD:
        assert not lets_through(tokenizer, grammar, written(form, ("w", arguments))), arguments


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_functions_that_allow_any_arguments_get_them(tokenizer: Tokenizer, name: str) -> None:
    form = TOOL_FORMATS[name].call_format
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True}
    grammar = guides.calls_grammar(form, {"w": schema})
    for arguments in ({}, {"a": 1}, {"b": "x"}, {"a": 1, "b": "x", "c": "y"}):
        assert lets_through(tokenizer, grammar, written(form, ("w", arguments))), arguments
    assert not lets_through(tokenizer, grammar, written(form, ("w", {"a": "x"})))


def test_a_format_without_json_objects_refuses_what_it_cannot_enforce() -> None:
    form = TOOL_FORMATS["glm45"].call_format
    several = {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    with pytest.raises(InvalidRequestError, match=r"parameters of 'f': 'anyOf' at the top.*in 'properties'"):
        guides.calls_grammar(form, {"f": several})
    with pytest.raises(InvalidRequestError, match="the parameter 'a b' can't be written"):
        guides.calls_grammar(form, {"f": {"properties": {"a b": {}}}})
    with pytest.raises(InvalidRequestError, match="the name 'a b' can't be written"):
        guides.calls_grammar(form, {"a b": {}})


CHANNELS = {"<|channel|>": 3, "<|message|>": 4, "<|end|>": 5, "<|start|>": 6, "<|constrain|>": 7}
"""Special tokens of the model of the tests, in the place of those of gpt-oss."""


@pytest.mark.parametrize("has_tokens", [True, False])
def test_harmony_has_thoughts_before_a_call_or_an_answer(tokenizer: Tokenizer, has_tokens: bool) -> None:
    tokens = CHANNELS if has_tokens else {}
    form = TOOL_FORMATS["openai"].call_format
    calls = guides.calls_grammar(form, {"w": VALUES}, tokens=tokens)
    no = guides.lark_grammar('start: "no"')

    def passes(grammar: str, text: str) -> bool:
        for mark, token in tokens.items():
            text = text.replace(mark, tokenizer.detokenize([token], skip_special_tokens=False))
        return lets_through(tokenizer, grammar, text)

    thoughts = "<|channel|>analysis<|message|>A <b>.<|end|><|start|>assistant"
    aside = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    called = written(form, ("w", GOOD[1]))
    required = guides.harmony_grammar(calls=calls, may_answer=False, tokens=tokens)
    either = guides.harmony_grammar(calls=calls, final=no, tokens=tokens)
    free = guides.harmony_grammar(calls=calls, tokens=tokens)
    for grammar in (required, either, free):
        assert passes(grammar, called)
        assert passes(grammar, thoughts + aside * has_tokens + called)
        assert not passes(grammar, thoughts)
        assert not passes(grammar, written(form, ("w", BAD[0])))
        assert not passes(grammar, called + called)
    for text, passing in (("no", (either, free)), ("yes", (free,))):
        for grammar in (required, either, free):
            assert passes(grammar, f"{thoughts}<|channel|>final<|message|>{text}") is (grammar in passing)
