"""Bytes and texts of the tokens in log probabilities, for byte-level and SentencePiece tokenizers."""

from __future__ import annotations

import pytest
from runtime_support.byte_backend import END, byte_backend
from tokenizers import AddedToken

from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.model.tokenizer.sentencepiece_bpe import sentencepiece_bpe
from megatron_runtime.server.bodies.protocol import CompletionBody
from megatron_runtime.server.generation.choice import TokenLogProb
from megatron_runtime.server.openai.answer import Answer
from megatron_runtime.server.openai.completions import Logprobs
from megatron_runtime.server.openai.token_texts import TokenTexts

SCRIPTS = ["Hello there", "日本語 🙂", "Привет é", "السلام", "👩‍👩‍👧‍👦 नमस्ते"]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁there", "▁H", "日", "e", "l", "o"]


def byte_level() -> Tokenizer:
    return Tokenizer(byte_backend(), location="here", eod=END)


def sentencepiece() -> Tokenizer:
    backend = sentencepiece_bpe(PIECES, [0.0] * 259 + [-float(rank) for rank in range(len(PIECES) - 259)], True)
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(backend, location="here", eod=2)


def scored(tokens: list[int], tokenizer: Tokenizer) -> list[TokenLogProb]:
    first = tokenizer.drops_first_space
    return [TokenLogProb(token, -1.0, {token: -1.0}, first and not at) for at, token in enumerate(tokens)]


@pytest.mark.parametrize("text", SCRIPTS)
@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()], ids=["byte-level", "sentencepiece"])
def test_joined_bytes_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.tokenize(text)
    assert tokenizer.detokenize(tokens) == text
    entries = [TokenTexts(tokenizer).scored(entry) for entry in scored(tokens, tokenizer)]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == text.encode()
    for entry in entries:
        (top,) = entry.pop("top_logprobs")
        assert top == entry


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()], ids=["byte-level", "sentencepiece"])
def test_offsets_are_those_of_the_characters(tokenizer: Tokenizer) -> None:
    text = "日本 🙂 there"
    body = CompletionBody.model_validate({"model": "m", "prompt": "a", "logprobs": 1})
    found = Logprobs(Answer(body, [[1]], ""), tokenizer).body(scored(tokenizer.tokenize(text), tokenizer))
    assert found is not None
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert text[offset:].startswith(token) or "\ufffd" in token
    assert {text[offset] for offset in found["text_offset"]} >= {"日", "本", "🙂"}


def test_likely_tokens_with_the_same_text_are_distinguished() -> None:
    texts = TokenTexts(byte_level())
    entry = TokenLogProb(0xE6, -1.0, {0xE6: -1.0, 0xE7: -2.0, 65: -3.0})
    assert texts.by_text(entry) == {"\ufffd": -1.0, "token_id:231": -2.0, "A": -3.0}
    assert [top["bytes"] for top in texts.scored(entry)["top_logprobs"]] == [[0xE6], [0xE7], [65]]
    by_id = TokenTexts(byte_level(), as_ids=True)
    assert by_id.by_text(entry) == {"token_id:230": -1.0, "token_id:231": -2.0, "token_id:65": -3.0}
    assert (by_id.scored(entry)["token"], by_id.scored(entry)["bytes"]) == ("token_id:230", [0xE6])


def test_scores_of_a_prompt_have_its_tokens_and_the_most_likely_ones() -> None:
    entries = (TokenLogProb(66, -9.0, {65: -0.5, 67: -1.5}), TokenLogProb(65, -0.5, {65: -0.5, 67: -1.5}))
    first, unlikely, likely = TokenTexts(byte_level()).prompt_scores(entries, 1)
    assert first is None
    assert unlikely == {
        "66": {"logprob": -9.0, "rank": None, "decoded_token": "B"},
        "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"},
    }
    assert likely == {"65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"}}
