"""``bad_words``: an answer contains none of these texts, and is the same as without them until it would."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.sampling_params import SamplingParams

PROMPT = "Once upon a time"
LENGTH = 96
BYTES = [chr(code) for code in range(33, 127)]


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> DynamicInferenceEngine:
    model = load_model(tiny_checkpoint, dtype="float32")
    return DynamicInferenceEngine.build(model, load_tokenizer(tiny_checkpoint), InferenceConfig(buffer_size_gb=0.01))


def answers(engine: DynamicInferenceEngine, *words: list[str] | None, temperature: float = 0.0) -> list[list[int]]:
    """Generated tokens with each of the lists of bad words, all in one batch."""
    params = [
        SamplingParams(temperature=temperature, seed=7, num_tokens_to_generate=LENGTH, ignore_eos=True, bad_words=bad)
        for bad in words
    ]
    futures = [engine.add_request(number, PROMPT, each) for number, each in enumerate(params)]
    while engine.has_unfinished_requests():
        engine.step_modern()
    return [list(future.result(timeout=0).merge().generated_tokens) for future in futures]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_bad_word_changes_the_answer_where_it_would_be_complete(
    engine: DynamicInferenceEngine, length: int, temperature: float
) -> None:
    (plain,) = answers(engine, None, temperature=temperature)
    starts = range(LENGTH - length + 1)
    start = next(at for at in starts if all(33 <= token < 127 for token in plain[at : at + length]))
    bad = plain[start : start + length]
    first = next(at for at in starts if plain[at : at + length] == bad)
    (kept, other) = answers(engine, [bytes(bad).decode()], None, temperature=temperature)
    assert other == plain
    assert kept[: first + length - 1] == plain[: first + length - 1]
    assert all(kept[at : at + length] != bad for at in starts)


def test_an_answer_has_other_tokens_when_all_characters_are_bad_words(engine: DynamicInferenceEngine) -> None:
    (answer,) = answers(engine, BYTES)
    assert len(answer) == LENGTH
    assert not any(chr(token) in BYTES for token in answer)


@pytest.mark.parametrize("words", ["no", [""], ["no", "  "], [7], ["no"] * 1001, ["no" * 500] * 17])
def test_bad_words_that_are_no_list_of_texts_are_rejected(words: object) -> None:
    with pytest.raises(InvalidRequestError, match="bad_words") as caught:
        SamplingParams(bad_words=words)  # type: ignore[arg-type]
    assert caught.value.field == "bad_words"


def test_bad_words_and_a_grammar_exclude_each_other() -> None:
    with pytest.raises(InvalidRequestError, match="not possible together with a grammar"):
        SamplingParams(bad_words=["no"], grammar='start: "no"')


def test_requests_with_the_same_bad_words_tokenize_them_once(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1000 texts of 1020 characters, for each of 60 choices, took 17 s between two steps."""
    tokenizer, texts = load_tokenizer(tiny_checkpoint), []
    tokenize = tokenizer.tokenize

    def noted(text: str, *, add_special_tokens: bool = False) -> list[int]:
        texts.append(text)
        return tokenize(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "tokenize", noted)
    model = load_model(tiny_checkpoint, dtype="float32")
    engine = DynamicInferenceEngine.build(model, tokenizer, InferenceConfig(buffer_size_gb=0.01))
    words = ["two", "bad"]
    for number in range(8):
        engine.add_request(number, [72], SamplingParams(bad_words=[*words], num_tokens_to_generate=2))
    assert sorted(texts) == sorted([*words, *(f" {word}" for word in words)])
    while engine.has_unfinished_requests():
        engine.step_modern()
