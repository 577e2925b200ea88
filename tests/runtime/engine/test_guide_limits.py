"""Limits of grammars: small bodies whose grammars took hundreds of megabytes, and states that answers share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits
from runtime_support.grammars import follow
from runtime_support.resident_memory import peak_growth

from megatron_runtime import guides
from megatron_runtime.call_format import CallFormat
from megatron_runtime.engine.sampling.compiled_grammars import MOST_IDLE, CompiledGrammars
from megatron_runtime.engine.sampling.grammar import RequestGuide
from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.guides import calls_grammar, choice_grammar, json_schema_grammar, lark_grammar, regex_grammar
from megatron_runtime.model.tokenizer import Tokenizer

MIB = 2**20
HERMES = CallFormat(begin="<tool_call>\n", end="\n</tool_call>", separator="\n")


def multiple(*values: float) -> dict[str, Any]:
    return {"properties": {f"p{index}": {"type": "number", "multipleOf": each} for index, each in enumerate(values)}}


def text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


@pytest.mark.parametrize(
    ("make", "value", "message"),
    [
        (json_schema_grammar, multiple(999_983), "'multipleOf' can be at most 10000 without decimal points"),
        (json_schema_grammar, multiple(99.9983), "leave out 99.9983"),
        (json_schema_grammar, multiple(5003, 5009), "added up; leave out 5009"),
        (json_schema_grammar, {"allOf": [{"multipleOf": 97}, {"multipleOf": 101}, {"multipleOf": 103}]}, "multiplied"),
        (
            json_schema_grammar,
            {"$ref": "#/x/y", "multipleOf": 997, "x": {"y": {"type": "integer", "multipleOf": 991}}},
            "multiplied",
        ),
        (json_schema_grammar, {"properties": {"x": {"multipleOf": 10**400 + 1}}}, "leave out 1000"),
        (json_schema_grammar, {"type": "number", "multipleOf": float("inf")}, "the grammar is not supported"),
        (json_schema_grammar, {"type": "number", "multipleOf": True}, "the grammar is not supported"),
        (lark_grammar, f"start: %json {json.dumps(multiple(999_983))}", "leave out 999983"),
        (regex_grammar, r"\pL" * 513, r"at most 512 Unicode classes, such as \p{L}, not 513"),
        (regex_grammar, "(?u)" + r"\w" * 513, "not 513"),
        (regex_grammar, "x" * 32_769, "at most 32768 characters, not 32769"),
        (json_schema_grammar, {"anyOf": [text(r"\p{L}" * 256), text(r"\p{L}" * 257)]}, "not 513"),
        (json_schema_grammar, {"patternProperties": {"x" * 20_000: {}, "y" * 20_000: {}}}, "patterns of the schema"),
        (lark_grammar, "start: /" + r"\w" * 32_000 + "/", "the grammar can have at most 512 Unicode classes"),
        (json_schema_grammar, {"const": {"a": ["x" * 16_385]}}, "a text of 16385 characters is too long"),
        (json_schema_grammar, {"properties": {"x" * 16_385: {}}}, "a text of 16385 characters"),
        (choice_grammar, ["x", "x" * 16_385], "a text of 16385 characters"),
        (json_schema_grammar, {"anyOf": [{"enum": [*range(2049)]}, {"enum": [*range(2048)]}]}, "at most 4096 values"),
    ],
)
def test_what_takes_memory_out_of_proportion_is_refused(make: Callable[[Any], str], value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        make(value)


def test_functions_have_the_limits_of_one_schema_together() -> None:
    functions = {f"f{index}": {"properties": {"x": text("[a-z]" * 1500)}} for index in range(5)}
    with pytest.raises(InvalidRequestError, match="can have at most 32768 characters, not 37500"):
        calls_grammar(HERMES, functions)
    with pytest.raises(InvalidRequestError, match=r"the parameters of 'heavy': .* leave out 999983"):
        calls_grammar(HERMES, {"heavy": multiple(999_983)})


@pytest.mark.parametrize("value", [0.01, 5, 60, 3600, 1000, 1_000_000, 500_000, 0.25])
def test_usual_multiples_are_followed(byte_tokenizer: Tokenizer, value: float) -> None:
    matcher = CompiledGrammars(byte_tokenizer).matcher(json_schema_grammar({"type": "number", "multipleOf": value}))
    right, wrong = (json.dumps(7 * value), json.dumps(7.5 * value))
    tokens = byte_tokenizer.tokenize(right)
    assert matcher.deep_copy().try_consume_tokens(tokens) == len(tokens)
    copy = matcher.deep_copy()
    assert copy.try_consume_tokens(byte_tokenizer.tokenize(wrong)) < len(wrong) or not copy.is_accepting()


@pytest.mark.parametrize(
    "make",
    [
        lambda: json_schema_grammar(multiple(9_973)),
        lambda: regex_grammar("(?i)" + "abcdefgh" * 4095),
        lambda: regex_grammar(".*a" * 10_922),
        lambda: regex_grammar(r"\pL" * 512),
        lambda: lark_grammar("start: " + " ".join(rf"/\w{index}/" for index in range(512))),
        lambda: json_schema_grammar({"const": "abcdefg " * 2048}),
        lambda: json_schema_grammar({"enum": [f"{index:05x}" for index in range(4096)]}),
        lambda: json_schema_grammar(text("|".join(f"{index:05x}" for index in range(5461)))),
    ],
    ids=["multiple", "letters", "wildcards", "classes", "lexemes", "text", "values", "alternatives"],
)
def test_grammars_within_the_limits_take_little_memory(byte_tokenizer: Tokenizer, make: Callable[[], str]) -> None:
    grammars = CompiledGrammars(byte_tokenizer)
    grammars.check(regex_grammar("a"))
    grammar, checked = peak_growth(make)
    _, compiled = peak_growth(lambda: follow(grammars.matcher(grammar), 20, choose=-1))
    assert checked < 16 * MIB
    assert compiled < 24 * MIB


class _Answer:
    """An answer that follows the guide of its request; ``choose`` selects one of the allowed tokens."""

    def __init__(self, grammar: str, tokenizer: Tokenizer, choose: Callable[[Any], int]) -> None:
        self.guide = RequestGuide(grammar, tokenizer, 0)
        self.tokens: list[int] = []
        self._vocab_size = tokenizer.vocab_size
        self._choose = choose

    def extend(self, number: int, *, num_drafts: int = 0) -> None:
        for _ in range(number):
            allowed = self.guide.after(self.tokens, len(self.tokens), self._vocab_size, num_drafts=num_drafts)
            assert self.guide.failure is None
            self.tokens.append(self._choose(np.flatnonzero(allowed)))


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    few = LLParserLimits(max_items_in_row=10_000, max_grammar_size=20_000, max_lexer_states=600)
    monkeypatch.setattr(guides, "LIMITS", few)


COUNTED = json_schema_grammar({"type": "string", "maxLength": 100_000})
"""Each character of its texts has states of its own."""


def letters(first: int) -> Callable[[Any], int]:
    """Choose letters in turn, and what there is where none is allowed."""
    turn = [first]

    def choose(allowed: Any) -> int:
        turn[0] += 1
        letter = ord("a") + turn[0] % 26
        return letter if letter in allowed else int(allowed[0])

    return choose


@pytest.mark.usefixtures("few_states")
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_answers_that_exhaust_the_states_of_their_grammar_disturb_no_other_one(
    byte_tokenizer: Tokenizer, num_drafts: int
) -> None:
    """Once the answers of a grammar had reached the limit together, all later ones failed at their first token."""
    running = _Answer(COUNTED, byte_tokenizer, letters(0))
    running.extend(10)
    for first in range(3):
        _Answer(COUNTED, byte_tokenizer, letters(first)).extend(150)
    running.extend(10, num_drafts=num_drafts)
    assert byte_tokenizer.detokenize(running.tokens) == '"cdefghijklmnopqrstu'


@pytest.mark.usefixtures("few_states")
def test_an_answer_that_continues_with_the_states_of_others_is_not_disturbed_either(byte_tokenizer: Tokenizer) -> None:
    """The lexer that another request has renewed may be nearly exhausted too."""
    waiting = [_Answer(COUNTED, byte_tokenizer, letters(0)) for _ in range(40)]
    for answer in waiting:
        answer.extend(3)
    for index, answer in enumerate(waiting):
        _Answer(COUNTED, byte_tokenizer, letters(index)).extend(97 + index)
        answer.extend(60)


@pytest.mark.usefixtures("few_states")
def test_an_answer_that_alone_has_too_many_states_fails_and_says_so(byte_tokenizer: Tokenizer) -> None:
    answer = _Answer(COUNTED, byte_tokenizer, letters(0))
    with pytest.raises(AssertionError):
        answer.extend(700)
    assert len(answer.tokens) > 400
    assert (answer.guide.failure or "").startswith("lexer error: too many states")
    _Answer(COUNTED, byte_tokenizer, letters(1)).extend(20)


def test_grammars_without_requests_are_few(byte_tokenizer: Tokenizer) -> None:
    """By their text alone, thousands of short ones were kept, whose answers had added up to 30 MiB to each."""
    grammars = CompiledGrammars(byte_tokenizer)
    for number in range(MOST_IDLE + 8):
        grammars.check(regex_grammar(f"a{{{number + 1}}}"))
    assert len(grammars._known) == MOST_IDLE + 1
