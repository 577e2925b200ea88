"""Tokenizers in Hugging Face folders, and the effect of the files beside tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from megatron_runtime.errors import CheckpointError, InvalidRequestError
from megatron_runtime.model.checkpoint import load_tokenizer
from megatron_runtime.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEXT = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs", "été à Noël"] * 4
MESSAGES = [{"role": "user", "content": "hello <b> & 'é'"}]


def train(byte_level: bool = True) -> Backend:
    """A tiny tokenizer: byte-level BPE, or SentencePiece with byte fallback."""
    if byte_level:
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet = []
    bytes_ = [] if byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<s>", "</s>", *bytes_]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in bytes_]
    return Backend.from_str(json.dumps(state))


def write(folder: Path, backend: Backend, **config: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    settings_ = {"bos_token": "<s>", "eos_token": "</s>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write(tmp_path_factory.mktemp("sentencepiece"), train(byte_level=False)))


@pytest.mark.model
def test_a_tokenizer_that_transformers_saved_is_read_unchanged(
    tmp_path: Path, reference_tokenizer: PreTrainedTokenizerFast, smollm2_path: Path
) -> None:
    reference_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    ours, original = load_tokenizer(tmp_path), load_tokenizer(smollm2_path)
    text = "In 2024  it's 7 o'clock <|im_end|> 🤖"
    assert ours.tokenize(text) == original.tokenize(text)
    assert ours.render_chat(MESSAGES) == original.render_chat(MESSAGES)
    assert (ours.eod, ours.bos) == (original.eod, original.bos)
    assert (ours.eos_token_ids, original.eos_token_ids) == ({2}, {0, 2})  # a GGUF file ends at known texts too


def test_special_tokens_may_be_written_as_objects(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, train(), eos_token={"content": "</s>", "lstrip": False}))
    assert tokenizer.eod == 2


def test_a_named_token_that_was_not_marked_special_is_marked(tmp_path: Path) -> None:
    backend = train()
    backend.add_tokens([AddedToken("<end>", special=False)])
    tokenizer = load_tokenizer(write(tmp_path, backend, eos_token="<end>"))
    assert tokenizer.tokenize("fox<end>")[-1] == tokenizer.eod
    assert tokenizer.detokenize(tokenizer.tokenize("fox<end>")) == "fox"


@pytest.mark.parametrize("ends", [[2, 0], 0])
def test_the_generation_config_adds_tokens_that_end_a_generation(tmp_path: Path, ends: int | list[int]) -> None:
    write(tmp_path, train())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eod == 2
    assert tokenizer.eos_token_ids == {0, 2}


def test_padding_and_truncation_that_were_saved_with_a_tokenizer_are_off(tmp_path: Path) -> None:
    backend = train()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    assert 3 < len(load_tokenizer(write(tmp_path, backend)).tokenize("the quick brown fox jumps")) < 50


def test_a_template_in_a_separate_file_has_precedence(tmp_path: Path) -> None:
    write(tmp_path, train(), chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0]['content'] }}")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.render_chat(MESSAGES) == "<s>hello <b> & 'é'"
    assert tokenizer.apply_chat_template(MESSAGES)[0] == tokenizer.bos


def test_a_request_with_tools_uses_the_template_for_tools(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | tojson }}"}]
    tokenizer = load_tokenizer(write(tmp_path, train(), chat_template=templates))
    assert tokenizer.render_chat(MESSAGES) == "plain"
    assert tokenizer.render_chat(MESSAGES, tools=[{"name": "<é>"}]) == '[{"name": "<é>"}]'


RenderWith = Callable[..., str]


@pytest.fixture
def render(tmp_path: Path) -> RenderWith:
    def render_with(template: str, **options: Any) -> str:
        return load_tokenizer(write(tmp_path, train(), chat_template=template)).render_chat(MESSAGES, **options)

    return render_with


def test_templates_have_the_helpers_of_transformers(render: RenderWith) -> None:
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == len("2024-05-17")
    assert render("{{ messages | tojson(indent=1) }}").startswith('[\n {\n  "role"')
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"
    assert render("{%- if true %}\n  x\n{%- endif %}") == "  x"
    assert render("{{ mood }}", mood="calm") == "calm"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0]['name'] + 'x' }}",
        "{% for %}",
        "{{ messages + 1 }}",
    ],
)
def test_a_template_that_fails_or_leaves_its_sandbox_rejects_the_messages(render: RenderWith, template: str) -> None:
    with pytest.raises(InvalidRequestError, match="messages: the model's chat template refuses them") as refused:
        render(template)
    assert refused.value.field == "messages"


def test_the_message_of_a_template_that_raises_is_reported(render: RenderWith) -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_model_without_a_template_rejects_chats(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, train()))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="this model has no chat template"):
        tokenizer.apply_chat_template(MESSAGES)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: does not exist"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"has tokenizer\.model alone, .* Write a tokenizer\.json beside it"):
        load_tokenizer(tmp_path)


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    write(tmp_path, train())
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: can't be read as a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no end-of-text token found"):
        load_tokenizer(write(tmp_path, train(), eos_token=None))


def test_a_decoder_of_another_kind_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    backend = train()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match=r"decoder \['WordPiece'\] found, expected ByteLevel, ByteFallback or"):
        load_tokenizer(write(tmp_path, backend))


def test_a_sentencepiece_tokenizer_streams_spaces_and_byte_tokens(sentencepiece: Tokenizer) -> None:
    text = "the fox 🦊 é jumps"
    stream = sentencepiece.incremental()
    pieces = [stream.push([token]) for token in sentencepiece.tokenize(text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(text=st.text(max_size=30))
def test_any_text_streamed_by_a_sentencepiece_tokenizer_is_complete(text: str, sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.tokenize(text)
    stream = sentencepiece.incremental()
    assert "".join(stream.push([token]) for token in ids) + stream.flush() == sentencepiece.detokenize(ids)
