"""``thinking_token_budget``: the reasoning of an answer has at most this many tokens before its end marker."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from runtime_support.byte_backend import END, byte_backend

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.sampling.thinking import ThinkingLimit
from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.model.tokenizer.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

MakeEngine = Callable[..., DynamicInferenceEngine]
PROMPT = [72, 101, 108, 108, 111]
LETTERS = [97, 98, 99]


def generated(engine: DynamicInferenceEngine, **fields: object) -> bytes:
    params = SamplingParams(seed=3, num_tokens_to_generate=24, ignore_eos=True, **fields)  # type: ignore[arg-type]
    (record,) = engine.generate([PROMPT], params)
    return bytes(token for token in record.merge().generated_tokens if token < END)


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_the_end_marker_follows_the_last_token_of_the_budget(make_engine: MakeEngine, budget: int) -> None:
    plain = generated(make_engine(), temperature=0)
    limited = generated(make_engine(), temperature=0, thinking_token_budget=budget)
    assert limited[: budget + 8] == plain[:budget] + b"</think>"
    assert len(limited) == len(plain)


def test_reasoning_that_ends_within_its_budget_is_unchanged(make_engine: MakeEngine) -> None:
    plain = generated(make_engine(), temperature=0)
    at = next(at for at in range(20) if plain[at : at + 2].isascii())
    end = plain[at : at + 2].decode()
    assert generated(make_engine(), temperature=0, thinking_token_budget=at + 2, thinking_end=end) == plain


def test_an_answer_without_the_begin_marker_has_no_reasoning(make_engine: MakeEngine) -> None:
    plain = generated(make_engine(), temperature=0)
    fields = {"thinking_token_budget": 2, "thinking_begin": "<think>"}
    assert generated(make_engine(), temperature=0, **fields) == plain


def limit(text: bytes, *, begin: str = "", budget: int = 3, marks: tuple[str, ...] = ()) -> list[int | None]:
    """The forced token after each prefix of the answer ``text``, which follows a prompt of two tokens."""
    tokenizer = Tokenizer(byte_backend(marks), location="here", eod=END)
    thinking = ThinkingLimit(tokenizer, 2, budget=budget, begin=begin, end="</t>")
    tokens = [1, 2, *tokenizer.tokenize(text.decode())]
    return [thinking.forced(tokens, length) for length in range(2, len(tokens) + 1)]


def test_the_budget_counts_from_the_begin_marker() -> None:
    end = [*b"</t>"]
    assert limit(b"abc</t>def") == [None] * 3 + end + [None] * 4
    assert limit(b" <t>abc</t>def", begin="<t>") == [None] * 7 + end + [None] * 4
    assert limit(b"a<t>bcdefg", begin="<t>") == [None] * 11
    assert limit(b"ab</t>cdefgh", budget=6) == [None] * 13


def test_a_marker_can_be_one_special_token() -> None:
    marks = ("<t>", "</t>")
    assert limit(b"<t>abcd", begin="<t>", marks=marks) == [None] * 4 + [END + 2, None]
    assert limit(b"<t>ab</t>cdefg", begin="<t>", marks=marks) == [None] * 10


def test_a_repeated_pass_forces_the_same_token() -> None:
    tokenizer = Tokenizer(byte_backend(), location="here", eod=END)
    thinking = ThinkingLimit(tokenizer, 0, budget=2, begin="", end="</t>")
    tokens = [*b"ab</"]
    assert [thinking.forced(tokens, length) for length in (2, 3, 4, 2)] == [*b"</t", *b"<"]


@pytest.mark.parametrize(
    "fields", [{"thinking_token_budget": -1}, {"thinking_end": ""}, {"thinking_begin": "x" * 65}, {"thinking_end": 7}]
)
def test_limits_that_make_no_sense_are_rejected(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match="thinking_"):
        SamplingParams(**fields)  # type: ignore[arg-type]
