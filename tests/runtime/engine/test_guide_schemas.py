"""Schemas and patterns of users: closed objects and ASCII classes, checked with llguidance on real tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_runtime.call_format import CallFormat
from megatron_runtime.engine.sampling.compiled_grammars import CompiledGrammars
from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.guide_schemas import ascii_classes, prepared_schema
from megatron_runtime.guides import calls_grammar, json_schema_grammar, regex_grammar
from megatron_runtime.model.tokenizer import Tokenizer

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
HERMES = CallFormat(begin="<tool_call>\n", end="\n</tool_call>", separator="\n")


@pytest.fixture
def grammars(byte_tokenizer: Tokenizer) -> CompiledGrammars:
    return CompiledGrammars(byte_tokenizer)


@pytest.fixture
def matches(grammars: CompiledGrammars, byte_tokenizer: Tokenizer) -> Any:
    def matches(grammar: str, text: str) -> bool:
        matcher, tokens = grammars.matcher(grammar), byte_tokenizer.tokenize(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return matches


def call(arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.mark.parametrize("parameters", [{}, {"type": "object"}, {"type": "object", "properties": {}}])
def test_a_function_without_parameters_gets_no_arguments(matches: Any, parameters: dict[str, Any]) -> None:
    grammar = calls_grammar(HERMES, {"f": {"type": "object", **parameters}})
    assert matches(grammar, call({}))
    assert not matches(grammar, call({"a_parameter": 1}))


def test_a_function_gets_no_arguments_that_its_schema_does_not_list(matches: Any) -> None:
    grammar = calls_grammar(HERMES, {"f": CITY})
    assert matches(grammar, call({"city": "Paris"}))
    assert not matches(grammar, call({"city": "Paris", "temperature": 25}))


def test_a_function_whose_schema_allows_other_arguments_gets_them(matches: Any) -> None:
    for schema in (CITY | {"additionalProperties": True}, {"type": "object", "additionalProperties": True}):
        assert matches(calls_grammar(HERMES, {"f": schema}), call({"city": "Paris", "temperature": 25}))


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        (CITY, {"city": "x"}, {"city": "x", "more": 1}),
        ({"type": "object", "properties": {"at": CITY}}, {"at": {"city": "x"}}, {"at": {"city": "x", "more": 1}}),
        ({"type": "array", "items": CITY}, [{"city": "x"}], [{"city": "x", "more": 1}]),
        ({"anyOf": [CITY, {"type": "null"}]}, None, {"city": "x", "more": 1}),
        ({"$ref": "#/$defs/C", "$defs": {"C": CITY}}, {"city": "x"}, {"city": "x", "more": 1}),
        # An object without listed properties is a mapping.
        ({"type": "object", "properties": {"tags": {"type": "object"}}}, {"tags": {"a": 1}}, {"more": 1}),
        # A property may have the name of a keyword, and a value its form.
        ({"type": "object", "properties": {"pattern": CITY}}, {"pattern": {"city": "x"}}, {"pattern": {"more": 1}}),
        ({"enum": [{"properties": {"d": 1}}]}, {"properties": {"d": 1}}, {}),
    ],
)
def test_objects_have_the_listed_properties_only(
    matches: Any, schema: dict[str, Any], accepted: Any, refused: Any
) -> None:
    grammar = json_schema_grammar(schema)
    assert matches(grammar, json.dumps(accepted))
    assert not matches(grammar, json.dumps(refused))


NAME: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TEXT = {"type": "string"}
EITHER = {"type": "object", "properties": {"a": TEXT, "b": TEXT}}
REFERRED: dict[str, Any] = {"$defs": {"C": CITY}}


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        ({**EITHER, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": "x"}, {"b": "y"}], [{}]),
        (
            {**EITHER, "anyOf": [{"properties": {"a": {"const": "x"}}, "required": ["a"]}, {"required": ["b"]}]},
            [{"a": "x"}, {"a": "y", "b": "y"}],
            [{"a": "y"}],
        ),
        ({"allOf": [CITY, {"description": "d"}]}, [{"city": "x"}], [{}]),
        ({"allOf": [CITY, NAME]}, [{"city": "x", "name": "y"}], [{"city": "x"}, {"city": 1, "name": "y"}]),
        ({**NAME, "$ref": "#/$defs/C", **REFERRED}, [{"name": "y", "city": "x"}], [{"name": "y"}]),
        ({"$ref": "#/$defs/C", "properties": {}, "description": "d", **REFERRED}, [{"city": "x"}], [{}]),
        ({**NAME, "anyOf": [CITY, {"properties": {"at": TEXT}}]}, [{"name": "y"}, {"name": "y", "city": "x"}], [{}]),
        ({"anyOf": [CITY, NAME]}, [{"city": "x"}, {"name": "y"}], [{"city": "x", "name": "y"}]),
    ],
)
def test_an_object_has_the_properties_that_the_schemas_for_it_list(
    matches: Any, schema: dict[str, Any], accepted: list[Any], refused: list[Any]
) -> None:
    """By itself, as a property beside others, and as the arguments of a function."""
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    inner = {"type": "object", "properties": {"q": TEXT, "in": schema}, "required": ["in"], **definitions}
    for grammar, written in (
        (json_schema_grammar(schema), json.dumps),
        (json_schema_grammar(inner), lambda value: json.dumps({"in": value})),
        (calls_grammar(HERMES, {"f": schema}), call),
    ):
        for value in accepted:
            assert matches(grammar, written(value)), value
        for value in [*refused, *({**value, "more": 1} for value in accepted)]:
            assert not matches(grammar, written(value)), value
    assert not matches(json_schema_grammar(inner), json.dumps({"in": accepted[0], "more": 1}))


@pytest.mark.parametrize(
    ("schema", "accepted"),
    [
        ({**NAME, "allOf": [{"additionalProperties": True}]}, {"name": "x", "more": 1}),
        ({**NAME, "allOf": [{"patternProperties": {"^x": {}}}]}, {"name": "x", "x": 1}),
        # Both schemas of the property apply.
        (
            {"properties": {"at": CITY}, "allOf": [{"properties": {"at": NAME}}]},
            {"at": {"city": "x", "name": "y"}},
        ),
        (
            {"items": CITY, "allOf": [{"items": {"$ref": "#/$defs/N"}}], "$defs": {"N": NAME}},
            [{"city": "x", "name": "y"}],
        ),
    ],
)
def test_schemas_that_can_not_be_closed_together_stay_open(matches: Any, schema: dict[str, Any], accepted: Any) -> None:
    assert matches(json_schema_grammar(schema), json.dumps(accepted))


def test_a_schema_that_refers_to_itself_is_closed(matches: Any) -> None:
    node = {"type": "object", "properties": {"v": TEXT, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    grammar = json_schema_grammar(node)
    assert matches(grammar, json.dumps({"v": "x", "next": {"v": "y", "next": None}}))
    assert not matches(grammar, json.dumps({"v": "x", "next": {"v": "y", "more": 1}}))
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}}
    assert prepared_schema(loop) == loop


CHAIN = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}], "properties": {f"p{i}": {}}} for i in range(900)}
LARGE = {"large": {"properties": {f"p{i}": {} for i in range(900)}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/d0", "$defs": CHAIN},
        {"properties": {f"q{i}": {"allOf": [{"$ref": "#/$defs/large"}]} for i in range(900)}, "$defs": LARGE},
    ],
)
def test_a_schema_of_very_many_combinations_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="combines too many schemas"):
        json_schema_grammar(schema)


def test_a_required_parameter_that_is_not_listed_is_refused_with_its_function() -> None:
    for parameters in ({"type": "object", "required": ["q"]}, {**CITY, "required": ["city", "q"]}):
        with pytest.raises(InvalidRequestError, match=r"parameters of 'f': 'required' names 'q'.* add it there"):
            calls_grammar(HERMES, {"f": parameters})


def test_schemas_that_apply_together_do_not_exclude_each_others_properties(matches: Any) -> None:
    named = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    for schema in ({"allOf": [CITY, named]}, {**named, "$ref": "#/$defs/C", "$defs": {"C": CITY}}):
        both = [json.dumps(value) for value in ({"city": "x", "name": "y"}, {"name": "y", "city": "x"})]
        assert any(matches(json_schema_grammar(schema), text) for text in both)


def test_a_schema_is_not_changed_in_place() -> None:
    before = json.dumps(CITY)
    assert prepared_schema(CITY)["additionalProperties"] is False
    assert json.dumps(CITY) == before


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(5_000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequestError, match="can't be converted"):
        json_schema_grammar(schema)


@pytest.mark.parametrize(
    ("pattern", "accepted", "refused"),
    [
        (r"\d+", "12", "\u0661\u0662"),
        (r"[\d.]+", "1.2", "\u0661.2"),
        (r"\w+", "a_1", "caf\u00e9"),
        (r"a\sb", "a b", "a\u00a0b"),
        (r"\D", "\u0661", "1"),
        (r"[\D]", "\u0661", "1"),
        (r"[^\d]", "\u0661", "1"),
        (r"[]\d]+", "]1", "\u0661"),
        (r"[^]\d]", "a", "]"),
        (r"\\d", "\\d", "1"),
        (r"\[\d\]", "[1]", "[\u0661]"),
        (r"(?u)\d", "\u0661", "a"),
        (r"[[:alpha:]\d]+", "a1", "\u0661"),
        ("\u00e9+", "\u00e9", "e"),
    ],
)
def test_classes_of_patterns_are_those_of_ascii(matches: Any, pattern: str, accepted: str, refused: str) -> None:
    assert matches(regex_grammar(pattern), accepted)
    assert not matches(regex_grammar(pattern), refused)


@pytest.mark.parametrize("pattern", ["", "[", "a\\", "[\\d", "]", "[]", "\\"])
def test_incomplete_patterns_are_left_to_the_parser(pattern: str) -> None:
    assert ascii_classes(pattern) == pattern.replace("\\d", "0-9")


def test_patterns_in_schemas_are_ascii(matches: Any) -> None:
    grammar = json_schema_grammar({"type": "string", "pattern": r"^\d{2}$"})
    assert matches(grammar, '"12"')
    assert not matches(grammar, '"\u0661\u0662"')
