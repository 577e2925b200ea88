"""Stop strings are found independently of token boundaries."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.engine.stop_matcher import StopMatcher

PIECES = st.lists(st.text("ab", max_size=3), max_size=14)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@given(PIECES, STOPS)
def test_a_stop_string_is_found_as_soon_as_it_is_complete(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = ""
    for piece in pieces:
        text += piece
        found = matcher.push(piece)
        assert found == any(stop in text for stop in stops)
        if found:
            assert matcher.match is not None
            start, end = matcher.match
            assert text[start:end] in stops
            assert start == min(text.find(stop) for stop in stops if stop in text)
            return


@given(PIECES, STOPS)
def test_safe_tokens_stay_safe(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    safe = 0
    for piece in pieces:
        found = matcher.push(piece)
        assert matcher.safe_tokens() >= safe
        safe = matcher.safe_tokens()
        if found:
            break
    if matcher.match is not None:
        assert "".join(pieces[:safe]) == matcher.text[: len("".join(pieces[:safe]))]
        assert len("".join(pieces[:safe])) <= matcher.match[0]


def test_a_stop_string_across_three_tokens_is_held_back_and_found() -> None:
    matcher = StopMatcher(["###"])
    assert [matcher.push(piece) for piece in ("ok ", "#", "#", "#!")] == [False, False, False, True]
    assert matcher.match == (3, 6)
    assert matcher.safe_tokens() == 1


def test_a_partial_match_that_fails_releases_the_held_tokens() -> None:
    matcher = StopMatcher(["END"])
    matcher.push("x")
    matcher.push("EN")
    assert matcher.safe_tokens() == 1
    matcher.push("T")
    assert matcher.safe_tokens() == 3


def test_bytes_of_an_unfinished_character_are_held_back_too() -> None:
    matcher = StopMatcher(["é"])
    matcher.push("a")
    matcher.push("")
    assert matcher.safe_tokens() == 1
    assert matcher.push("é")
    assert matcher.safe_tokens() == 1


def test_a_stop_string_before_min_tokens_is_ignored_permanently() -> None:
    matcher = StopMatcher(["ab", "b"])
    assert not matcher.push("xab", may_match=False)
    assert not matcher.push("a")
    assert matcher.push("b")
    assert matcher.match == (3, 5)


@pytest.mark.parametrize("stops", [["a" * 60 + f"{number:03}" for number in range(256)], ["a" * 16_000]])
def test_the_cost_of_a_character_depends_neither_on_the_number_nor_on_the_length_of_stop_strings(
    stops: list[str],
) -> None:
    text = ("a" * 59 + "b") * 200
    most = 4 * executed_lines(StopMatcher(["x"]), text)
    assert executed_lines(StopMatcher(stops), text) < most


def executed_lines(matcher: StopMatcher, text: str) -> int:
    """The number of lines of Python that are executed for this text, which does not depend on the machine."""
    count = 0

    def trace(*_: object) -> object:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        assert not matcher.push(text)
    finally:
        sys.settrace(before)
    return count
