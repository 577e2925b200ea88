"""SmolLM2's tokenizer from the GGUF alone, compared with ``reference_tokenizer``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.model.checkpoint import load_tokenizer
from megatron_runtime.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

pytestmark = pytest.mark.model

MIXED = (Path(__file__).parents[1] / "data" / "mixed.txt").read_bytes().decode("utf-8")
CHAT = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And  16 squared? 🤔"},
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


def ids_of(reference: PreTrainedTokenizerFast, text: str) -> list[int]:
    return reference(text, add_special_tokens=False)["input_ids"]


def test_every_line_of_the_mixed_text_has_the_tokens_that_transformers_gives_it(
    tokenizer: Tokenizer, reference_tokenizer: PreTrainedTokenizerFast
) -> None:
    lines = MIXED.split("\n")
    assert len(lines) > 150
    for number, line in enumerate(lines, start=1):
        assert tokenizer.tokenize(line) == ids_of(reference_tokenizer, line), f"line {number}: {line!r}"


def test_the_mixed_text_as_a_whole_has_the_tokens_that_transformers_gives_it(
    tokenizer: Tokenizer, reference_tokenizer: PreTrainedTokenizerFast
) -> None:
    assert tokenizer.tokenize(MIXED) == ids_of(reference_tokenizer, MIXED)


def test_every_digit_is_a_separate_token(tokenizer: Tokenizer) -> None:
    def pieces(text: str) -> list[str]:
        return [tokenizer.detokenize([token]) for token in tokenizer.tokenize(text)]

    assert pieces("in 2024") == ["in", " ", "2", "0", "2", "4"]
    assert pieces("a  1") == ["a", "  ", "1"]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_text_is_decoded_as_by_transformers(
    tokenizer: Tokenizer, reference_tokenizer: PreTrainedTokenizerFast, skip_special_tokens: bool
) -> None:
    ids = tokenizer.tokenize(MIXED)
    expected = reference_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    assert tokenizer.detokenize(ids, skip_special_tokens=skip_special_tokens) == expected


def test_text_without_special_tokens_survives_a_round_trip(tokenizer: Tokenizer) -> None:
    for line in MIXED.split("\n"):
        assert tokenizer.detokenize(tokenizer.tokenize(line), skip_special_tokens=False) == line


def test_the_names_of_the_special_tokens_are_known(tokenizer: Tokenizer) -> None:
    assert tokenizer.tokenize("<|im_end|>") == [tokenizer.eod] == [2]
    assert tokenizer.tokenize("<|endoftext|>") == [0]
    assert tokenizer.eos_token_ids == {0, 2}
    assert tokenizer.bos == 1
    assert tokenizer.vocab_size == 49152


def test_a_document_gets_no_begin_of_text_token_when_the_file_disables_it(tokenizer: Tokenizer) -> None:
    assert tokenizer.tokenize("Hello", add_special_tokens=True) == tokenizer.tokenize("Hello")


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Answer in French."}]])
def test_a_chat_becomes_the_prompt_of_transformers(
    tokenizer: Tokenizer,
    reference_tokenizer: PreTrainedTokenizerFast,
    system: list[dict[str, str]],
    add_generation_prompt: bool,
) -> None:
    options = {"add_generation_prompt": add_generation_prompt}
    expected = reference_tokenizer.apply_chat_template(system + CHAT, tokenize=False, **options)
    assert tokenizer.render_chat(system + CHAT, **options) == expected
    assert tokenizer.apply_chat_template(system + CHAT, **options) == ids_of(reference_tokenizer, expected)


def test_a_message_that_the_template_can_not_render_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="messages: the model's chat template refuses them"):
        tokenizer.render_chat([{"role": "user"}])


def test_streamed_text_joins_to_the_whole_text_without_split_characters(tokenizer: Tokenizer) -> None:
    text = "Families 👨‍👩‍👧‍👦 and flags 🇫🇷; 𝔘𝔫𝔦𝔠𝔬𝔡𝔢, ภาษาไทย, 你好"
    stream = tokenizer.incremental()
    pieces = [stream.push([token]) for token in tokenizer.tokenize(text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces, "some token holds a part of a character only"
    assert stream.flush() == ""


def test_an_incomplete_character_is_emitted_when_the_stream_ends(tokenizer: Tokenizer) -> None:
    beginning = tokenizer.tokenize("𐌰")[:1]
    stream = tokenizer.incremental()
    assert stream.push(beginning) == ""
    assert stream.flush() == "\ufffd"
    assert tokenizer.detokenize(beginning) == "\ufffd"


def test_special_tokens_are_streamed_only_on_request(tokenizer: Tokenizer) -> None:
    ids = tokenizer.tokenize("yes<|im_end|>")
    assert tokenizer.incremental().push(ids) == "yes"
    assert tokenizer.incremental(skip_special_tokens=False).push(ids) == "yes<|im_end|>"


@settings(max_examples=200)
@given(ids=st.lists(st.integers(min_value=0, max_value=49200), max_size=40))
def test_any_tokens_streamed_one_by_one_give_the_text_of_them_all(ids: list[int], tokenizer: Tokenizer) -> None:
    stream = tokenizer.incremental()
    streamed = "".join(stream.push([token]) for token in ids) + stream.flush()
    assert streamed == tokenizer.detokenize(ids)
