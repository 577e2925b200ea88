"""Answers that the token limit cuts off: what remains of calls and of the markers of reasoning."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_runtime.server.messages.message_parser import MessageParser
from megatron_runtime.server.messages.message_parts import (
    CallArguments,
    CallStart,
    Content,
    Part,
    Reasoning,
    joined,
)
from megatron_runtime.server.messages.reasoning import REASONING_STYLES, ReasoningParser
from megatron_runtime.server.messages.tool_parsers.formats import TOOL_FORMATS

PARIS = '{"city": "Paris"}'
SCHEMAS: dict[str, Any] = {"w": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}}
CUT_CALLS = {
    "hermes": '<tool_call>\n{"name": "w", "argu',
    "llama3_json": '{"name": "w", "para',
    "mistral": '[TOOL_CALLS][{"name": "w", ',
    "pythonic": '[w(city="Par',
    "qwen3_coder": "<tool_call>\n<function=",
}
REASONED = [
    ("deepseek_r1", "<think>Hm.</think>\nYes"),
    ("qwen3", "\n<think>\nHm.\n</think>\n\nYes"),
    ("granite", "Here is my thought process: Hm. Here is my response: Yes"),
    ("granite", "Here's my thought process:Hm.Here's my response:<response>Yes</response>"),
    ("kimi_k2", "<think>Hm.</think>Yes"),
    ("minimax_m2", "Hm.\n</think>Yes"),
]


def read(parser: MessageParser, text: str, *, is_cut: bool) -> list[Part]:
    return joined([*parser.push(text), *parser.finish(is_cut=is_cut)])


def reasoning_parser(name: str) -> MessageParser:
    style = REASONING_STYLES[name]
    return MessageParser(ReasoningParser(in_reasoning=style.is_certain, style=style))


def cut(name: str, text: str, *, requires_call: bool = False) -> list[Part]:
    form = TOOL_FORMATS[name]
    parser = MessageParser(None, form.parser(SCHEMAS), begins_call=form.begins_call, requires_call=requires_call)
    return read(parser, text, is_cut=True)


@pytest.mark.parametrize(
    ("name", "first"),
    [("hermes", "<t"), ("llama3_json", '{"'), ("mistral", "[T"), ("pythonic", "[w"), ("qwen3_coder", "<t")],
)
def test_a_call_that_is_cut_off_before_its_arguments_leaves_no_content(name: str, first: str) -> None:
    text = CUT_CALLS[name]
    for end in range(len(first), len(text) + 1):
        assert cut(name, text[:end]) == []


@pytest.mark.parametrize(
    ("name", "whole", "rest"),
    [
        ("hermes", f'<tool_call>\n{{"name": "w", "arguments": {PARIS}}}\n</tool_call>', '\n<tool_call>\n{"name": "'),
        ("llama3_json", f'{{"name": "w", "parameters": {PARIS}}}', '; {"name": "w'),
        ("mistral", f'[TOOL_CALLS][{{"name": "w", "arguments": {PARIS}}}', ', {"name'),
        ("pythonic", '[w(city="Paris")', ', w(city="'),
    ],
)
def test_a_call_that_is_cut_off_beside_a_complete_one_leaves_no_content(name: str, whole: str, rest: str) -> None:
    for end in range(1, len(rest) + 1):
        assert cut(name, whole + rest[:end])[:2] == [CallStart("w"), CallArguments(PARIS)]
        assert not [part for part in cut(name, whole + rest[:end]) if isinstance(part, Content)]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_required_call_that_is_cut_off_leaves_no_content_from_its_first_character(name: str) -> None:
    text = TOOL_FORMATS[name].call_format.text([("w", {"s": "a < b", "n": 3})])
    for end in range(1, len(text) + 1):
        assert not [part for part in cut(name, text[:end], requires_call=True) if isinstance(part, Content)]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_call_that_is_cut_off_leaves_no_content_from_its_second_character(name: str) -> None:
    """One character may be an answer without a call."""
    text = TOOL_FORMATS[name].call_format.text([("w", {"s": "a < b", "n": 3})])
    assert cut(name, text[0]) == [Content(text[0])]
    for end in range(2, len(text) + 1):
        assert not [part for part in cut(name, text[:end]) if isinstance(part, Content)], text[:end]


@pytest.mark.parametrize("name", CUT_CALLS)
@pytest.mark.parametrize("text", ["a <", "Is 1 < 2? [see", '{"city": "Par', "[1, 2", "x <b"])
def test_text_that_is_cut_off_is_kept(name: str, text: str) -> None:
    assert cut(name, text) == [Content(text)]


@pytest.mark.parametrize(("style", "text"), REASONED)
def test_an_answer_that_is_cut_off_has_no_part_of_a_marker_of_its_reasoning(style: str, text: str) -> None:
    assert read(reasoning_parser(style), text, is_cut=False) == [Reasoning("Hm."), Content("Yes")]
    for end in range(1, len(text) + 1):
        parts = read(reasoning_parser(style), text[:end], is_cut=True)
        reasoning, content = ("".join(p.text for p in parts if isinstance(p, kind)) for kind in (Reasoning, Content))
        assert "Hm.".startswith(reasoning), text[:end]
        assert "Yes".startswith(content), text[:end]


def test_an_answer_of_harmony_that_is_cut_off_has_no_part_of_a_marker_in_its_reasoning() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes"
    for end in range(1, len(text) + 1):
        parts = cut("openai", text[:end])
        assert "Hm.".startswith("".join(part.text for part in parts if isinstance(part, Reasoning)))
