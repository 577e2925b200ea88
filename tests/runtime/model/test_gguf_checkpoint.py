"""GGUF files: the same model as in the original folder, and errors that name file and remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runtime_support.reference_models import CLOSE, logits_of

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.checkpoint import inspect_checkpoint, load_model, load_tokenizer
from megatron_runtime.model.formats.checkpoint_path import model_name
from megatron_runtime.model.formats.gguf_file import GgufFile
from megatron_runtime.model.weights import LoadProgress

WriteGguf = Callable[..., Path]


@pytest.mark.parametrize("kind", sorted(gguf.quants._type_traits), ids=lambda kind: kind.name)
def test_every_type_is_dequantized_in_chunks_as_by_the_gguf_package(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (300, 2 * size), dtype=np.uint8)
    writer = GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "one.gguf")
    tensor = file.tensors["token_embd.weight"]
    assert tensor.shape == (300, 2 * elements)
    with np.errstate(all="ignore"):
        pieces = np.concatenate([file.rows(tensor, part) for part in (slice(0, 2), slice(2, 261), slice(261, 300))])
        np.testing.assert_array_equal(pieces, gguf.quants.dequantize(raw, kind))


@pytest.mark.model
def test_the_header_of_smollm2_reads_as_the_package_reads_it(smollm2_path: Path) -> None:
    ours, theirs = GgufFile(smollm2_path), GGUFReader(smollm2_path)
    expected = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == expected
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert (mine.kind, mine.offset, mine.num_bytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)


@pytest.mark.model
def test_the_configuration_of_smollm2_has_its_rotary_base_and_tied_head(smollm2_path: Path) -> None:
    config = inspect_checkpoint(smollm2_path).config
    assert config.rope_theta == 100000.0
    assert config.tie_word_embeddings
    assert config.head_dim == 64
    assert config.max_position_embeddings == 8192


def test_progress_grows_to_the_bytes_that_are_stored(
    tmp_path: Path, write_gguf: WriteGguf, model_of_blocks: Any
) -> None:
    path = write_gguf(tmp_path / "model.gguf", model_of_blocks(), kind=GGMLQuantizationType.Q8_0)
    seen: list[LoadProgress] = []
    load_model(path, on_progress=seen.append, dtype="float32")
    loaded = [progress.loaded_bytes for progress in seen]
    assert loaded == sorted(loaded)
    assert seen[-1].loaded_bytes == seen[-1].total_bytes == inspect_checkpoint(path).weight_bytes


def complaint(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(path, dtype="float32")
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_file_of_another_format_is_refused_with_its_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 a zip file")
    assert r"is no GGUF file: it starts with b'PK\x03\x04', expected b'GGUF'. Name a .gguf file" in complaint(path)


def test_an_unknown_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + (9).to_bytes(4, "little") + bytes(16))
    assert "GGUF version 9 found, expected 2 or 3" in complaint(path)


def test_a_truncated_file_is_refused_with_actual_and_expected_size(
    tmp_path: Path, write_gguf: WriteGguf, model_of_blocks: Any
) -> None:
    path = write_gguf(tmp_path / "model.gguf", model_of_blocks())
    whole = path.read_bytes()
    path.write_bytes(whole[:-5000])
    assert f"is truncated: {len(whole) - 5000:,} bytes found, " in complaint(path)
    assert "Fetch the file again" in complaint(path)


def test_a_file_truncated_anywhere_is_refused_with_a_message(
    tmp_path: Path, write_gguf: WriteGguf, model_of_blocks: Any
) -> None:
    path = write_gguf(tmp_path / "model.gguf", model_of_blocks())
    whole = path.read_bytes()
    for length in [*range(300), *range(300, len(whole) - 100, 997)]:
        path.write_bytes(whole[:length])
        assert re.search("is no GGUF file|is truncated", complaint(path))


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(4, 2500), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_header_is_refused_with_a_message_or_harmless(
    edits: list[tuple[int, int]], tmp_path: Path, write_gguf: WriteGguf, model_of_blocks: Any
) -> None:
    original = tmp_path / "original.gguf"
    if not original.exists():
        write_gguf(original, model_of_blocks(), metadata=add_tokenizer)
    data = bytearray(original.read_bytes())
    for position, value in edits:
        data[position] = value
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data)
    for read in (inspect_checkpoint, load_tokenizer):
        try:
            read(damaged)
        except CheckpointError as error:
            assert str(damaged) in str(error)  # noqa: PT017 - most edits do no harm


def add_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([chr(ord("a") + index) for index in range(26)] + ["ab", "<end>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 27 + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(27)


@pytest.mark.parametrize(
    ("leave_out", "said"),
    [
        ("model.layers.1.mlp.down_proj.weight", "tensor model.layers.1.mlp.down_proj.weight missing"),
        ("model.embed_tokens.weight", "llama.vocab_size is missing"),
    ],
)
def test_a_missing_tensor_is_named_as_in_the_original(
    leave_out: str, said: str, tmp_path: Path, write_gguf: WriteGguf, model_of_blocks: Any
) -> None:
    path = write_gguf(tmp_path / "model.gguf", model_of_blocks(), leave_out=[leave_out])
    assert said in complaint(path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("split.count", 3, "is one of 3 parts, which are found by names that end in -00001-of-00003.gguf. Rename"),
        ("llama.rope.dimension_count", 8, "llama.rope.dimension_count is 8, only 16 is supported"),
    ],
)
def test_an_unsupported_kind_of_model_is_refused(
    key: str, value: int, said: str, tmp_path: Path, write_gguf: WriteGguf, model_of_blocks: Any
) -> None:
    path = write_gguf(tmp_path / "model.gguf", model_of_blocks(), metadata=lambda writer: writer.add_uint32(key, value))
    assert said in complaint(path)


def test_a_divided_file_is_read_through_any_of_its_parts(
    tmp_path: Path, write_gguf: WriteGguf, model_of_blocks: Any, paged_requests: Any
) -> None:
    model = model_of_blocks("Qwen3")
    write_gguf(tmp_path / "model.gguf", model, metadata=add_tokenizer, split_max_tensors=9)
    parts = sorted(tmp_path.iterdir())
    assert [part.name for part in parts] == [f"model-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    expected = logits_of(model, list(range(1, 20)))
    for path in (tmp_path, parts[0], parts[2]):
        ours = paged_requests(load_model(path, dtype="float32")).forward({"it": list(range(1, 20))})["it"]
        torch.testing.assert_close(ours, expected, **CLOSE)
        assert load_tokenizer(path).eos_token_ids == {27}
    origin = load_model(parts[0], dtype="float32").origin
    assert origin is not None
    parts[1].touch()
    assert not origin.is_unchanged()
    parts[1].unlink()
    assert "is one of 3 parts; model-00002-of-00003.gguf missing. Fetch them" in complaint(parts[0])


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("model.gguf", "model"),
        ("a/model-Q8_0-00001-of-00002.gguf", "model-Q8_0"),
        ("model-0001-of-0002.gguf", "model-0001-of-0002"),
        ("a/folder-1.5", "folder-1.5"),
    ],
)
def test_a_model_has_the_name_of_its_file_without_the_part(file: str, name: str) -> None:
    assert model_name(Path(file)) == name


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    said = complaint(tmp_path / "model.gguf")
    assert "architecture 'mamba' is not known; the known ones are llama, mistral" in said


def test_a_type_that_can_not_be_dequantized_is_named(
    tmp_path: Path, write_gguf: WriteGguf, model_of_blocks: Any
) -> None:
    def wide_norm(writer: GGUFWriter) -> None:
        writer.add_tensor("output_norm.weight", np.ones(64, dtype=np.float64))

    path = write_gguf(tmp_path / "model.gguf", model_of_blocks(), leave_out=["model.norm.weight"], metadata=wide_norm)
    assert "tensor output_norm.weight has type F64, which can't be dequantized. Choose another" in complaint(path)


def test_a_configuration_with_more_layers_than_tensors_allocates_no_memory(
    tmp_path: Path, write_gguf: WriteGguf, model_of_blocks: Any
) -> None:
    path = write_gguf(tmp_path / "model.gguf", model_of_blocks())
    data = path.read_bytes()
    key = b"llama.block_count" + gguf.GGUFValueType.UINT32.to_bytes(4, "little")
    path.write_bytes(data.replace(key + (2).to_bytes(4, "little"), key + (10**6).to_bytes(4, "little")))
    assert "1,000,000 layers expected by the configuration, but only 21 tensors found" in complaint(path)
