"""Parsing of reasoning and tool calls in every format, for any split of the text."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.server.messages.message_parser import MessageParser
from megatron_runtime.server.messages.message_parts import (
    CallArguments,
    CallStart,
    Content,
    Part,
    PartParser,
    Reasoning,
    joined,
)
from megatron_runtime.server.messages.reasoning import ReasoningParser
from megatron_runtime.server.messages.tool_parsers.formats import TOOL_FORMATS

HERMES, LLAMA, MISTRAL, PYTHONIC = (TOOL_FORMATS[name] for name in ("hermes", "llama3_json", "mistral", "pythonic"))
SCHEMAS: dict[str, dict[str, Any]] = {
    "w": {
        "properties": {
            "n": {"type": "integer"},
            "s": {"type": "string"},
            "o": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            "t": {"type": ["string", "null"]},
            "b": {"type": "boolean"},
        }
    }
}
PARIS = '{"city": "Paris"}'


def call(name: str, arguments: str) -> list[Part]:
    return [CallStart(name), CallArguments(arguments)]


def read(parser: PartParser, *pieces: str) -> list[Part]:
    return joined([*(part for piece in pieces for part in parser.push(piece)), *parser.finish()])


def calls_parser(name: str, most_calls: int | None = None) -> MessageParser:
    return MessageParser(None, TOOL_FORMATS[name].parser(SCHEMAS), most_calls=most_calls)


CASES: list[tuple[str, str, list[Part]]] = [
    ("hermes", "No call.\n", [Content("No call.\n")]),
    ("hermes", f'<tool_call>\n{{"name": "w", "arguments": {PARIS}}}\n</tool_call>', call("w", PARIS)),
    (
        "hermes",
        'I look.\n\n<tool_call>{"name":"a","arguments":{}}</tool_call>\n<tool_call>{"arguments": [1], "name": "b"}'
        "</tool_call>\nSo.",
        [Content("I look."), *call("a", "{}"), *call("b", "[1]"), Content("So.")],
    ),
    ("hermes", '<tool_call>{"name": "w"}</tool_call>', call("w", "{}")),
    ("hermes", '<tool_call>{"name": "w", "arguments": null}</tool_call>', call("w", "{}")),
    ("hermes", '<tool_call>{"name": "w", "arguments": "{\\"a\\": 1}"}</tool_call>', call("w", '{"a": 1}')),
    (
        "hermes",
        '<tool_call>{"name": "w", "arguments": {"a": "}</tool_call>\\""} }</tool_call>',
        call("w", '{"a": "}</tool_call>\\""}'),
    ),
    ("hermes", '<tool_call>{"name": "w", "arguments": {"a": 1}</tool_call>', call("w", '{"a": 1}')),
    ("hermes", '<tool_call>{"name": "w", "arguments": {"a": [1', call("w", '{"a": [1')),
    ("hermes", '<tool_call>{"name": "a", "arguments": {}}<tool_call>{"name": "b"}', call("a", "{}") + call("b", "{}")),
    ("hermes", "<tool_call>no json</tool_call>", [Content("<tool_call>no json</tool_call>")]),
    ("hermes", '<tool_call>{"city": "Paris"}</tool_call>', [Content('<tool_call>{"city": "Paris"}</tool_call>')]),
    ("hermes", "a < b, and <tool", [Content("a < b, and <tool")]),
    ("llama3_json", f'{{"name": "w", "parameters": {PARIS}}}', call("w", PARIS)),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "w", "parameters": {PARIS}}}; {{"name": "v", "parameters": {{}}}}',
        call("w", PARIS) + call("v", "{}"),
    ),
    ("llama3_json", '{"name": "Ann", "age": 3}', [Content('{"name": "Ann", "age": 3}')]),
    ("llama3_json", '<|python_tag|>f("a")', [Content('<|python_tag|>f("a")')]),
    ("llama3_json", 'It is {"name": "w", "parameters": {}}', [Content('It is {"name": "w", "parameters": {}}')]),
    ("mistral", f'[TOOL_CALLS][{{"name": "w", "arguments": {PARIS}}}]', call("w", PARIS)),
    (
        "mistral",
        f'Yes. [TOOL_CALLS] [{{"name": "w", "arguments": {PARIS}}}, {{"name": "v", "arguments": {{}}}}]',
        [Content("Yes."), *call("w", PARIS), *call("v", "{}")],
    ),
    ("mistral", f"[TOOL_CALLS]w{PARIS}[TOOL_CALLS]v[ARGS]{{}}", call("w", PARIS) + call("v", "{}")),
    ("mistral", f"[TOOL_CALLS]w[CALL_ID]abcdefghi[ARGS]{PARIS}", call("w", PARIS)),
    ("mistral", "[TOOL_CALLS][1]", [Content("[TOOL_CALLS][1]")]),
    ("mistral", "[TOOL_CALLS] [ ] so", [Content("[TOOL_CALLS] [ ] so")]),
    ("mistral", '[TOOL_CALLS][{"name": "w"}, so]', [*call("w", "{}"), Content("so]")]),
    ("mistral", '[TOOL_CALLS]{"name": "w"} so', [*call("w", "{}"), Content("so")]),
    ("mistral", "[TOOL_CALLS] later", [Content("[TOOL_CALLS] later")]),
    ("pythonic", "[w(city='Paris')]", call("w", PARIS)),
    (
        "pythonic",
        "<|python_start|>[a.b(x=[1, {'k': True}], y=\"],(\"), c()]<|python_end|>",
        call("a.b", '{"x": [1, {"k": true}], "y": "],("}') + call("c", "{}"),
    ),
    ("pythonic", "[w(on=true, off=None)]", call("w", '{"on": true, "off": null}')),
    ("pythonic", "[1, 2]", [Content("[1, 2]")]),
    ("pythonic", "[w(1)]", [Content("[w(1)]")]),
    ("pythonic", "[]", [Content("[]")]),
    ("pythonic", "[w(a=1), v(b=", [*call("w", '{"a": 1}'), Content("v(b=")]),
    (
        "qwen3_coder",
        'Sure.\n<tool_call>\n<function=w>\n<parameter=n>\n3\n</parameter>\n<parameter=s>\nif a < b:\n\t"x"\n\n'
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=v>\n</function>\n</tool_call>",
        [Content("Sure."), *call("w", '{"n": 3, "s": "if a < b:\\n\\t\\"x\\"\\n"}'), *call("v", "{}")],
    ),
    (
        "qwen3_coder",
        '<function=w><parameter=o>{"k": [1]}</parameter><parameter=t>null</parameter><parameter=b>True</parameter>'
        "<parameter=z>7</parameter><parameter=n>many</parameter></function> So.",
        [*call("w", '{"o": {"k": [1]}, "t": null, "b": true, "z": "7", "n": "many"}'), Content("So.")],
    ),
    ("qwen3_coder", "<function=w><parameter=s>\nab", call("w", '{"s": "ab')),
    ("qwen3_coder", "<tool_call> so", [Content("<tool_call> so")]),
    ("qwen3_coder", "a <function=> b", [Content("a <function=> b")]),
    ("pythonic", "Hello [w()]", [Content("Hello [w()]")]),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_calls_are_separated_from_content(name: str, text: str, expected: list[Part]) -> None:
    assert read(calls_parser(name), text) == expected
    assert read(calls_parser(name), *text) == expected


@pytest.mark.parametrize(
    ("in_reasoning", "text", "expected"),
    [
        (False, "<think>\nHm.\n</think>\n\nYes. ", [Reasoning("Hm."), Content("Yes. ")]),
        (False, "Yes.", [Content("Yes.")]),
        (False, "<thin", [Content("<thin")]),
        (True, "Hm. </think>Yes.", [Reasoning("Hm."), Content("Yes.")]),
        (True, "<think>Hm.</think>", [Reasoning("Hm.")]),
        (True, "Hm </thin", [Reasoning("Hm </thin")]),
        (False, "<think>\n\n</think>\n\nYes.", [Content("Yes.")]),
        (True, "", []),
    ],
)
def test_reasoning_is_separated_from_content(in_reasoning: bool, text: str, expected: list[Part]) -> None:
    assert read(ReasoningParser(in_reasoning=in_reasoning), text) == expected
    assert read(ReasoningParser(in_reasoning=in_reasoning), *text) == expected


def test_calls_are_parsed_only_after_the_reasoning() -> None:
    said = '<tool_call>{"name": "a"}</tool_call>'
    parser = MessageParser(ReasoningParser(in_reasoning=True), HERMES.parser({}))
    assert read(parser, f"I could {said}</think>\n{said}") == [Reasoning(f"I could {said}"), *call("a", "{}")]


def test_calls_beyond_the_limit_are_dropped() -> None:
    said = '<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call>'
    assert read(calls_parser("hermes", most_calls=1), said * 3) == call("a", '{"x": 1}')


def test_a_call_is_streamed_while_it_is_generated() -> None:
    parser = calls_parser("hermes")
    assert parser.push('Sure. <tool_call>{"name": "w", "arg') == [Content("Sure.")]
    assert parser.push('uments": {"city": "P') == [CallStart("w"), CallArguments('{"city": "P')]
    assert parser.push('aris"') == [CallArguments('aris"')]
    assert parser.push("}") == [CallArguments("}")]
    assert parser.push("}</tool_call>") == []
    assert parser.finish() == []


XML = ["<function=w>", "</function>", "<parameter=s>", "<parameter=n>", "</parameter>", "\n"]
MARKS = [
    *XML,
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "[ARGS]",
    "[",
    "]",
]
SCRAPS = [
    *MARKS,
    '{"name": "w", "arguments": {"a": "ö"}}',
    '"parameters": ',
    "f(a=1)",
    "{",
    "}",
    '"',
    "\\",
    ",",
    ";",
    " ",
]
texts = st.lists(st.sampled_from(SCRAPS) | st.text(max_size=6), max_size=12).map("".join)

SPLIT_FORMATS = ("hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder")

READERS: dict[str, Callable[[], PartParser]] = {
    **{name: lambda name=name: calls_parser(name) for name in SPLIT_FORMATS},  # type: ignore[misc]
    "thinking": lambda: ReasoningParser(in_reasoning=True),
    "both": lambda: MessageParser(ReasoningParser(in_reasoning=False), HERMES.parser({}), most_calls=2),
}


@pytest.mark.parametrize("name", READERS)
@given(text=texts, cuts=st.lists(st.integers(0, 80), max_size=8))
def test_the_parts_do_not_depend_on_how_the_text_is_split(name: str, text: str, cuts: list[int]) -> None:
    ends = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[start:end] for start, end in pairwise(ends)]
    whole = read(READERS[name](), text)
    assert read(READERS[name](), *pieces) == whole
    assert not any(not part.text for part in whole if not isinstance(part, CallStart))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    calls=st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), json_values, max_size=3)), min_size=1),
    indent=st.sampled_from([None, 2]),
)
def test_every_call_in_a_models_format_is_parsed_with_its_arguments(calls: list[tuple[str, Any]], indent: Any) -> None:
    for form in (HERMES, LLAMA, MISTRAL):
        written = form.call_format
        assert written is not None
        objects = [json.dumps({"name": n, written.arguments: a}, indent=indent) for n, a in calls]
        one_by_one = written.separator.join(f"{written.begin}{object}{written.end}" for object in objects)
        parts = read(calls_parser(form.name), f"{written.opening}{one_by_one}{written.closing}")
        found = [
            (start.name, json.loads(rest.text))
            for start, rest in zip(parts[::2], parts[1::2], strict=True)
            if isinstance(start, CallStart) and isinstance(rest, CallArguments)
        ]
        assert found == calls


def test_a_call_that_ends_by_itself_without_its_end_is_content() -> None:
    text = '<tool_call>\n{"name": "w", "argu'
    assert read(calls_parser("hermes"), text) == [Content(text)]
