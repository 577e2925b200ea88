"""Answers in the formats of model families, as their chat templates define them, for every split of the text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_runtime.server.messages.markers import begun_length
from megatron_runtime.server.messages.message_parser import MessageParser
from megatron_runtime.server.messages.message_parts import CallArguments, CallStart, Content, Part, Reasoning, joined
from megatron_runtime.server.messages.reasoning import REASONING_STYLES, ReasoningParser
from megatron_runtime.server.messages.tool_parsers.formats import TOOL_FORMATS
from megatron_runtime.server.parsers import REASONING_PARSERS, TOOL_PARSERS

SCHEMAS: dict[str, dict[str, Any]] = {
    "w": {
        "properties": {
            "city": {"type": "string"},
            "n": {"$ref": "#/$defs/count"},
            "tags": {"type": "array"},
            "t": {"enum": ["a", None]},
        },
        "$defs": {"count": {"type": "integer"}},
    },
    "v": {},
}
PARIS = '{"city": "Paris"}'
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
KIMI = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI_SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
TO_W = "<|channel|>commentary to=functions.w <|constrain|>json<|message|>"


def call(name: str, arguments: str, own_id: str | None = None) -> list[Part]:
    return [CallStart(name, own_id), CallArguments(arguments)]


def parser(tool_parser: str | None, reasoning: str | None = None, *, in_reasoning: bool = False) -> MessageParser:
    style = None if reasoning is None else REASONING_STYLES[reasoning]
    thoughts = None if style is None else ReasoningParser(in_reasoning=in_reasoning or style.is_certain, style=style)
    if tool_parser is None:
        return MessageParser(thoughts)
    form = TOOL_FORMATS[tool_parser]
    return MessageParser(thoughts, form.parser(SCHEMAS), begins_call=form.begins_call)


def read(made: MessageParser, *pieces: str, is_cut: bool = False) -> list[Part]:
    return joined([*(part for piece in pieces for part in made.push(piece)), *made.finish(is_cut=is_cut)])


CASES: list[tuple[str, str | None, str, list[Part]]] = [
    ("openai", None, "<|channel|>final<|message|>Yes.\n", [Content("Yes.\n")]),
    ("openai", None, f"{ANALYSIS}<|channel|>final<|message|>Yes.<|return|>", [Reasoning("Hm."), Content("Yes.")]),
    ("openai", None, f"{ANALYSIS}{TO_W}{PARIS}<|call|>", [Reasoning("Hm."), *call("w", PARIS)]),
    ("openai", None, f" to=functions.w<|channel|>commentary json<|message|>{PARIS}", call("w", PARIS)),
    (
        "openai",
        None,
        f"{ANALYSIS} to=functions.w<|channel|>commentary json<|message|>{PARIS}<|call|>",
        [Reasoning("Hm."), *call("w", PARIS)],
    ),
    ("openai", None, "<|channel|>commentary to=v<|message|><|call|>", call("v", "{}")),
    (
        "openai",
        None,
        f"{ANALYSIS}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{TO_W}{PARIS}",
        [Reasoning("Hm."), Content("I look."), *call("w", PARIS)],
    ),
    (
        "openai",
        None,
        f"{ANALYSIS}{ANALYSIS}<|channel|>analysis to=python code<|message|>1+1<|end|>",
        [Reasoning("Hm.\nHm.\n1+1")],
    ),
    ("openai", None, "Plain < text, to be read", [Content("Plain < text, to be read")]),
    ("openai", None, "<|channel|>final Yes", [Content("<|channel|>final Yes")]),
    ("openai", None, "<|channel|>fin<|end|>\nYes", [Content("<|channel|>fin<|end|>\nYes")]),
    ("openai", None, "<|channel|>final<|message|>Yes <|start", [Content("Yes <|start")]),
    ("openai", None, "<|start|>assistant<|channel|>final<|message|>Yes", [Content("Yes")]),
    (
        "deepseek_v3",
        "deepseek_v3",
        "<think>\nHm.\n</think>\n\nI look.\n" + DEEPSEEK.format(f"{V3.format('w', PARIS)}\n{V3.format('v', '{}')}"),
        [Reasoning("Hm."), Content("I look."), *call("w", PARIS), *call("v", "{}")],
    ),
    ("deepseek_v3", None, V3.format("w", '{"city": "}```"}'), call("w", '{"city": "}```"}')),
    ("deepseek_v3", None, DEEPSEEK[:20] + V3.format("w", PARIS), call("w", PARIS)),
    ("deepseek_v3", None, DEEPSEEK.format("none") + " So", [Content(DEEPSEEK.format("none") + " So")]),
    ("deepseek_v31", None, DEEPSEEK.format(V31.format("w", PARIS)), call("w", PARIS)),
    (
        "deepseek_v31",
        None,
        DEEPSEEK.format(V31.format("w", PARIS) + V31.format("v", "{}")),
        [
            *call("w", PARIS),
            *call("v", "{}"),
        ],
    ),
    ("deepseek_v31", None, V31.format("w x", PARIS), [Content(V31.format("w x", PARIS))]),
    ("deepseek_v31", None, V31.format("w", "[1]"), [Content(V31.format("w", "[1]"))]),
    ("deepseek_v31", None, DEEPSEEK.format(V31.format("w", '{"a": [1')), call("w", '{"a": [1')),
    ("deepseek_v31", None, DEEPSEEK.format(V31.format("w", "{}")) + "\nSo.", [*call("w", "{}"), Content("So.")]),
    (
        "kimi_k2",
        "kimi_k2",
        "<think>Hm." + KIMI_SECTION.format(KIMI.format("w", 3, PARIS) + KIMI.format("v", 4, "{}")),
        [Reasoning("Hm."), *call("w", PARIS, "functions.w:3"), *call("v", "{}", "functions.v:4")],
    ),
    (
        "kimi_k2",
        "kimi_k2",
        "<think>Hm.</think>I look." + KIMI_SECTION.format(KIMI.format("w", 0, "{}") * 2),
        [Reasoning("Hm."), Content("I look."), *call("w", "{}", "functions.w:0"), *call("w", "{}")],
    ),
    ("kimi_k2", None, KIMI_SECTION.format(""), [Content(KIMI_SECTION.format(""))]),
    (
        "glm45",
        "glm45",
        "\n<think>Hm.</think>\nI look.\n<tool_call>w\n<arg_key>city</arg_key>\n<arg_value>A\n<b></arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n<arg_key>tags</arg_key>\n<arg_value>[1, null]</arg_value>\n"
        "</tool_call>\n<tool_call>v\n</tool_call>",
        [
            Reasoning("Hm."),
            Content("I look."),
            *call("w", '{"city": "A\\n<b>", "n": 3, "tags": [1, null]}'),
            *call("v", "{}"),
        ],
    ),
    (
        "glm45",
        None,
        "<tool_call>w<arg_key>t</arg_key><arg_value>null</arg_value></tool_call> So.",
        [*call("w", '{"t": null}'), Content("So.")],
    ),
    ("glm45", None, "<tool_call>v</tool_call>", call("v", "{}")),
    ("glm45", None, '<tool_call>{"name": "w"}', [Content('<tool_call>{"name": "w"}')]),
    ("glm45", None, "<tool_call> or not</tool_call>", [Content("<tool_call> or not</tool_call>")]),
    ("glm45", None, "<tool_call>w\n<arg_key>city</arg_key>\n<arg_value>Pa", call("w", '{"city": "Pa')),
    (
        "minimax_m2",
        "minimax_m2",
        'Hm.\n</think>\n\nI look.\n<minimax:tool_call>\n<invoke name="w">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="n">3</parameter>\n</invoke>\n<invoke name="v">\n</invoke>\n</minimax:tool_call>',
        [Reasoning("Hm."), Content("I look."), *call("w", '{"city": "Paris", "n": 3}'), *call("v", "{}")],
    ),
    ("minimax_m2", None, "<minimax:tool_call> no", [Content("<minimax:tool_call> no")]),
    ("minimax_m2", None, '<invoke name="w"><parameter name="n">', call("w", '{"n": ')),
    (
        "granite",
        "granite",
        "Here is my thought process:\nHm.\n\nHere is my response:\n<|tool_call|>"
        f'[{{"name": "w", "arguments": {PARIS}}}, {{"name": "v", "arguments": {{}}}}]',
        [Reasoning("Hm."), *call("w", PARIS), *call("v", "{}")],
    ),
    ("granite", "granite", "Here's my thought process: A Here's my response: B", [Reasoning("A"), Content("B")]),
    ("granite", "granite", "Here is my answer", [Content("Here is my answer")]),
    (
        "granite",
        "granite",
        "<think>Hm.</think>\n<response>Yes </resp </response>",
        [Reasoning("Hm."), Content("Yes </resp ")],
    ),
    ("granite", None, f'<tool_call> {{"name": "w", "arguments": {PARIS}}}', call("w", PARIS)),
    ("granite", None, f'<|tool_call|>[{{"name": "w", "arguments": {PARIS}, "label": "$var_1"}}]', call("w", PARIS)),
    ("granite", None, "<|tool_call|>[] or", [Content("<|tool_call|>[] or")]),
    ("granite", None, "<|tool_call|> or", [Content("<|tool_call|> or")]),
    ("phi4_mini_json", None, f'functools[{{"name": "w", "arguments": {PARIS}}}]', call("w", PARIS)),
    (
        "phi4_mini_json",
        None,
        f'So: <|tool_call|>[{{"name": "w", "arguments": {PARIS}}}]<|/tool_call|> Yes <|/tool_call|>',
        [Content("So:"), *call("w", PARIS), Content("Yes <|/tool_call|>")],
    ),
    (
        "phi4_mini_json",
        None,
        f'<|tool_call|>{{"name": "w", "arguments": {PARIS}}}<|/tool_call|>'
        '<|tool_call|>{"name": "v", "parameters": {}}<|/tool_call|>',
        [*call("w", PARIS), *call("v", "{}")],
    ),
    ("phi4_mini_json", None, "Use functools[1] of functools", [Content("Use functools[1] of functools")]),
    (
        "gemma3",
        None,
        "[w(city='Paris', n=3, tags=[true, None])]",
        call("w", '{"city": "Paris", "n": 3, "tags": [true, null]}'),
    ),
    (
        "gemma3",
        None,
        '```tool_code\n[w(city="Paris"), v()]\n```\nSo.',
        [
            *call("w", PARIS),
            *call("v", "{}"),
            Content("So."),
        ],
    ),
    ("gemma3", None, '```tool_code\nw(city="Paris")\nprint(v())\n```', [*call("w", PARIS), *call("v", "{}")]),
    ("gemma3", None, "```python\nx = 1\n```", [Content("```python\nx = 1\n```")]),
    ("gemma3", None, "```\nw(", [Content("```\nw(")]),
    ("gemma3", None, "```java\n[w()]\n```", [Content("```java\n[w()]\n```")]),
    ("llama4_pythonic", None, '<|python_start|>[w(city="Paris")]<|python_end|>', call("w", PARIS)),
    ("llama4_pythonic", None, '[w(city="\\ud83d\\x41")]', [Content('[w(city="\\ud83d\\x41")]')]),
    ("llama4_pythonic", None, '[get-w(city="\\ud83d\\ude00\\/")]', call("get-w", '{"city": "😀/"}')),
    (
        "llama3_json",
        None,
        f'<|python_start|>{{"name": "w", "parameters": {PARIS}}}<|python_end|>',
        call("w", PARIS),
    ),
]


@pytest.mark.parametrize(("tools", "reasoning", "text", "expected"), CASES)
def test_recorded_answers_are_parsed_at_every_split(
    tools: str, reasoning: str | None, text: str, expected: list[Part]
) -> None:
    assert read(parser(tools, reasoning), text) == expected
    assert read(parser(tools, reasoning), *text) == expected
    for at in range(len(text)):
        assert read(parser(tools, reasoning), text[:at], text[at:]) == expected


def test_every_parser_has_a_recorded_answer_here_or_in_the_tests_of_the_first_ones() -> None:
    known = {"hermes", "mistral", "pythonic", "qwen3_coder", "deepseek_r1", "qwen3", "openai_gptoss"}
    assert {*TOOL_PARSERS, *REASONING_PARSERS} == {*known, *(case[0] for case in CASES)}
    assert set(TOOL_PARSERS) == set(TOOL_FORMATS)
    assert set(REASONING_PARSERS) == {*REASONING_STYLES, "openai_gptoss"}


@pytest.mark.parametrize(("tools", "reasoning", "text", "expected"), CASES)
def test_an_answer_that_is_cut_off_anywhere_has_the_calls_so_far(
    tools: str, reasoning: str | None, text: str, expected: list[Part]
) -> None:
    calls = [part for part in expected if isinstance(part, CallStart | CallArguments)]
    for at in range(len(text)):
        found = read(parser(tools, reasoning), text[:at], is_cut=True)
        begun = [part for part in found if isinstance(part, CallStart | CallArguments)]
        *complete, last = [None, *begun]
        assert complete[1:] == calls[: len(begun)][:-1]
        if isinstance(last, CallArguments):
            end = max(begun_length(last.text, marker) for marker in ("</arg_value>", "</parameter>"))
            whole = calls[len(begun) - 1]
            assert isinstance(whole, CallArguments)
            assert last.text == "{}" or whole.text.startswith(last.text[: len(last.text) - end])
        elif last is not None:
            assert last == calls[len(begun) - 1]


CUT_CALLS = {
    "openai": ("<|", f"{TO_W[:-1]}"),
    "deepseek_v3": ("<｜", DEEPSEEK.format(V3.format("w", ""))[:-60]),
    "deepseek_v31": ("<｜", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>w<｜tool▁sep"),
    "kimi_k2": ("<|", "<|tool_calls_section_begin|><|tool_call_begin|>functions.w:0<|tool_call"),
    "glm45": ("<t", "<tool_call>w"),
    "minimax_m2": ("<m", '<minimax:tool_call>\n<invoke name="w'),
    "granite": ("<|", '<|tool_call|>[{"name": "w", "arg'),
    "phi4_mini_json": ("fun", 'functools[{"name": "w", "arg'),
    "gemma3": ("[w(", '[w(city="Par'),
    "llama4_pythonic": ("<|", '<|python_start|>[w(city="Par'),
}


@pytest.mark.parametrize("name", CUT_CALLS)
def test_a_call_that_is_cut_off_before_its_arguments_leaves_no_content(name: str) -> None:
    first, text = CUT_CALLS[name]
    for at in range(len(first), len(text) + 1):
        assert read(parser(name), text[:at], is_cut=True) == []
    assert read(parser(name), text) == [Content(text)]


SCRAPS = [
    *{marker for form in TOOL_FORMATS.values() for marker in form.markers},
    *{marker for style in REASONING_STYLES.values() for marker in style.markers},
    *("function", "functions.w:0", "w", "v", "to=functions.w", "analysis", "final", "assistant", "\n```", "```json\n"),
    *('<invoke name="w">', '<parameter name="n">', "</parameter>", "</invoke>", "<arg_key>n", "w(a=1)", "[", "]", "("),
    *('{"name": "w", "arguments": {"a": "ö"}}', '{"a": 1}', "{", "}", '"', "\\", ",", ";", " ", "\n"),
]
texts = st.lists(st.sampled_from(SCRAPS) | st.text(max_size=4), max_size=12).map("".join)

READERS: dict[str, Callable[[], MessageParser]] = {
    **{name: lambda name=name: parser(name) for name in TOOL_PARSERS},  # type: ignore[misc]
    **{f"{name} thoughts": lambda name=name: parser(None, name) for name in REASONING_STYLES},  # type: ignore[misc]
    "both": lambda: parser("kimi_k2", "kimi_k2", in_reasoning=True),
}


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=30)
@given(text=texts, data=st.data())
def test_no_text_crashes_a_parser_or_depends_on_its_split(name: str, text: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text)))
    whole = read(READERS[name](), text)
    assert read(READERS[name](), text[:at], text[at:]) == whole
    assert read(READERS[name](), *text) == whole
    has_markup = name == "openai" and any(marker in text for marker in TOOL_FORMATS["openai"].markers)
    if name in TOOL_PARSERS and not has_markup and not any(isinstance(part, CallStart) for part in whole):
        assert "".join(part.text for part in whole if isinstance(part, Content)).split() == text.split()


words = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<>`"), max_size=6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize("name", TOOL_PARSERS)
@settings(max_examples=30)
@given(values=st.lists(st.tuples(words, json_values), min_size=1, max_size=3))
def test_calls_in_a_models_format_are_parsed_with_their_arguments(name: str, values: list[tuple[str, Any]]) -> None:
    form = TOOL_FORMATS[name]
    schema = {"properties": {"s": {"type": "string"}, "x": {"type": ["object", "array", "number", "boolean", "null"]}}}
    if form.call_format.parameters is not None:
        values = [(text, None if isinstance(value, str) else value) for text, value in values]
    calls = [("w", {"s": text, "x": value}) for text, value in values][: 1 if form.call_format.is_single else None]
    made = MessageParser(None, form.parser({"w": schema}))
    parts = read(made, form.call_format.text(calls))
    assert [part.name for part in parts[::2] if isinstance(part, CallStart)] == ["w"] * len(calls)
    assert [json.loads(part.text) for part in parts[1::2] if isinstance(part, CallArguments)] == [
        arguments for _, arguments in calls
    ]
