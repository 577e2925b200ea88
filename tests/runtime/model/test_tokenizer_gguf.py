"""Tokenizers of other families in GGUF files, compared with those of transformers for the same file."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.checkpoint import load_tokenizer
from megatron_runtime.model.tokenizer.byte_level_bpe import PRE_TOKENIZERS, byte_level_bpe
from megatron_runtime.model.tokenizer.end_tokens import END_TEXTS, named_ends

MIXED = (Path(__file__).parents[1] / "data" / "mixed.txt").read_bytes().decode("utf-8")
CONTROL = ["<|end|>", "<|begin|>", "<|turn|>", "<|endoftext|>"]


def train_bytes() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level vocabulary learned from the mixed text, digits and spaces included."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False, max_token_length=12
    )
    backend.train_from_iterator(MIXED.split("\n"), trainer)
    model = json.loads(backend.to_str())["model"]
    return list(model["vocab"]), [" ".join(pair) for pair in model["merges"]]


def write(path: Path, change: Callable[[GGUFWriter], None], pre: str | None = "llama-bpe") -> Path:
    """A GGUF file with only a tokenizer; ``change`` adds the tested keys."""
    tokens, merges = train_bytes()
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in CONTROL else TokenType.NORMAL for token in tokens])
    writer.add_token_merges(merges)
    change(writer)
    return close(writer, path)


def close(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def ends(writer: GGUFWriter) -> None:
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(False)


def reference(path: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_each_kind_cuts_the_mixed_text_as_transformers_does(pre: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", ends, pre)
    ours, theirs = load_tokenizer(path), reference(path)
    # Defaults in transformers' reader; these are the values of the families' tokenizer.json files.
    theirs.backend_tokenizer.model.ignore_merges = pre in ("llama-bpe", "tekken")
    for line in MIXED.split("\n"):
        text = unicodedata.normalize("NFC", line) if pre == "qwen2" else line
        assert ours.tokenize(line) == theirs(text, add_special_tokens=False)["input_ids"], repr(line)


def test_the_kind_of_qwen_3_5_cuts_words_with_marks_as_transformers_does(tmp_path: Path) -> None:
    tokens, merges = train_bytes()
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    theirs = transformers.Qwen3_5Tokenizer(vocab=vocabulary, merges=[tuple(each.split(" ")) for each in merges])
    ours = load_tokenizer(write(tmp_path / "model.gguf", ends, "qwen35"))
    marked = "(हिन्दी) is\u0301n't हिन्दी\u0323!?"
    for line in (*MIXED.split("\n"), marked):
        assert ours.tokenize(line) == theirs(line, add_special_tokens=False)["input_ids"], repr(line)
    backends = [byte_level_bpe(tokens, merges, PRE_TOKENIZERS[pre]) for pre in ("qwen35", "qwen2")]
    pieces = [backend.pre_tokenizer.pre_tokenize_str(marked) for backend in backends]
    assert pieces[0] == theirs.backend_tokenizer.pre_tokenizer.pre_tokenize_str(marked)
    assert pieces[0] != pieces[1]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-4o", ["ITS", " Hello", "World", " don't", " ", "123", "45", "!/Ċ", " ", " x"]),
        ("llama-bpe", ["ITS", " HelloWorld", " don", "'t", " ", "123", "45", "!/Ċ", " ", " x"]),
        ("pixtral", ["ITS", " HelloWorld", " don", "'t", " ", "123", "45", "!/Ċ", " ", " x"]),
        ("glm4", ["ITS", " HelloWorld", " don", "'t", " ", "123", "45", "!/Ċ", " ", " x"]),
        ("seed-coder", ["ITS", " HelloWorld", " don", "'t", " ", *"12345", "!/", "Ċ", " ", " x"]),
        ("command-r", ["ITS", " HelloWorld", " don", "'t", " ", *"12345", "!/", "Ċ ", " x"]),
    ],
)
def test_each_kind_has_its_pieces(pre: str, pieces: list[str]) -> None:
    backend = byte_level_bpe(["a"], [], PRE_TOKENIZERS[pre])
    found = backend.pre_tokenizer.pre_tokenize_str("ITS HelloWorld don't 12345!/\n  x")
    assert [piece.replace("Ġ", " ") for piece, _ in found] == pieces


def test_llama_3_has_one_begin_of_text_token_in_documents_and_chats(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_eos_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_chat_template("<|begin|>{{ messages[0].content }}")

    tokenizer = load_tokenizer(write(tmp_path / "model.gguf", change))
    assert tokenizer.tokenize("a", add_special_tokens=True) == [1, *tokenizer.tokenize("a")]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}]) == [1, *tokenizer.tokenize("a")]


def test_the_end_of_a_turn_ends_a_generation_too(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        ends(writer)
        writer.add_eot_token_id(2)

    tokenizer = load_tokenizer(write(tmp_path / "model.gguf", change))
    assert tokenizer.eod == 0
    assert tokenizer.eos_token_ids == {0, 2, 3}


def test_a_template_for_tools_is_found_beside_the_default_one(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        ends(writer)
        writer.add_chat_template(
            [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
        )

    tokenizer = load_tokenizer(write(tmp_path / "model.gguf", change))
    assert tokenizer.render_chat([]) == "plain"
    assert tokenizer.render_chat([], tools=[{"name": "clock"}]) == "clock"


def write_sentencepiece(
    path: Path, *, adds_space: bool = True, last: str | None = None, kind: TokenType = TokenType.NORMAL
) -> Path:
    """A small SentencePiece vocabulary; ``last`` is one more token of this kind."""
    words = ["▁the", "▁fox", "▁jumps", "the", "he", "▁t", "▁f", "ox", "um", "ps", "▁j", "jumps", "▁▁", "▁▁▁▁", "umps"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.,é"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    kinds = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256]
    kinds += [TokenType.NORMAL] * (len(pieces) - len(kinds))
    if last is not None:
        pieces, kinds = [*pieces, last], [*kinds, kind]
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * 259 + [-float(rank) for rank in range(len(pieces) - 259)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if not adds_space:
        writer.add_add_space_prefix(False)
    return close(writer, path)


@pytest.mark.parametrize("kind", [TokenType.CONTROL, TokenType.NORMAL, TokenType.USER_DEFINED])
@pytest.mark.parametrize("text", sorted(END_TEXTS - {"</s>"}))
def test_an_end_of_generation_is_recognized_by_its_text(kind: TokenType, text: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path / "model.gguf", last=text, kind=kind))
    last = tokenizer.vocab_size - 1
    assert (tokenizer.eod, tokenizer.eos_token_ids) == (2, {2, last})
    tokens = tokenizer.tokenize(f"the fox{text}")
    assert tokens[-1] == last
    assert tokenizer.detokenize(tokens) == "the fox"


def test_the_end_of_a_message_does_not_end_the_generation_of_harmony() -> None:
    ends_of_phi = named_ends({"<|end|>": 5, "a": 1, "<|endoftext|>": 3}, [])
    assert ends_of_phi == [3, 5]
    assert named_ends({"<|end|>": 5, "<|return|>": 2, "<|call|>": 7}, []) == [2, 7]


@pytest.mark.parametrize(("kind", "expected"), [(TokenType.CONTROL, {0, 2, 3}), (TokenType.NORMAL, {0, 3})])
def test_the_end_of_struck_text_in_html_ends_no_generation(kind: TokenType, expected: set[int], tmp_path: Path) -> None:
    """``</s>`` is the end of a document if it is a control token, and may be an ordinary one."""

    def change(writer: GGUFWriter) -> None:
        tokens, _ = train_bytes()
        ends(writer)
        writer.add_token_list([*tokens[:2], "</s>", *tokens[3:]])
        writer.add_token_types([TokenType.CONTROL, TokenType.CONTROL, kind, *[TokenType.NORMAL] * (len(tokens) - 3)])

    assert load_tokenizer(write(tmp_path / "model.gguf", change)).eos_token_ids == expected


def test_missing_merges_of_a_sentencepiece_file_follow_from_its_scores(tmp_path: Path) -> None:
    path = write_sentencepiece(tmp_path / "model.gguf")
    ours, theirs = load_tokenizer(path), reference(path)
    for text in ("the fox jumps", "thefox  jumps     over, é 🦊 the é.", "xyz\n\tthe"):
        assert ours.tokenize(text) == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.detokenize(ours.tokenize(text)) == theirs.decode(ours.tokenize(text), skip_special_tokens=True)


def test_a_sentencepiece_document_begins_with_bos_unless_the_file_disables_it(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path / "model.gguf"))
    assert tokenizer.tokenize("the", add_special_tokens=True) == [1, *tokenizer.tokenize("the")]


def test_a_sentencepiece_file_can_disable_the_space_prefix(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path / "model.gguf", adds_space=False))
    ids = tokenizer.tokenize("the fox")
    stream = tokenizer.incremental()
    assert len(ids) == 2
    assert tokenizer.detokenize(ids) == stream.push(ids) == "the fox"
    assert tokenizer.incremental().push(ids[1:]) == " fox"


def complaint(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_an_unknown_pre_tokenizer_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    said = complaint(write(tmp_path / "model.gguf", ends, "jais"))
    assert "pre-tokenizer 'jais' is not known; the known ones are chatglm-bpe, command-r, dbrx" in said


def test_a_file_without_an_end_of_text_token_is_refused(tmp_path: Path) -> None:
    assert "tokenizer.ggml.eos_token_id is missing" in complaint(write(tmp_path / "model.gguf", lambda _: None))


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", lambda writer: writer.add_eos_token_id(10**6))
    assert "tokenizer.ggml.eos_token_id is 1000000, expected one of 1500 tokens" in complaint(path)


def test_a_file_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    assert "tokenizer.ggml.tokens is missing or empty" in complaint(close(writer, tmp_path / "model.gguf"))


def test_an_unknown_kind_of_tokenizer_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("bert")
    writer.add_token_list(["a"])
    said = complaint(close(writer, tmp_path / "model.gguf"))
    assert "tokenizer model 'bert' is not known; the known ones are gpt2 and llama" in said


def test_text_after_a_special_token_begins_with_a_space_again_as_in_llama_2(tmp_path: Path) -> None:
    """As in its published tokenizer.json and llama.cpp; transformers' own class, no longer ``legacy``, differs."""
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path / "model.gguf"))
    assert tokenizer.tokenize("</s>the") == [2, *tokenizer.tokenize("the")]
