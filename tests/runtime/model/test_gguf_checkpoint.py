"""GGUF files: the same model as in the folder they were made of, and errors that name the file and the mend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.checkpoint import inspect_checkpoint, load_model, load_tokenizer
from megatron_runtime.model.gguf_config import gguf_config
from megatron_runtime.model.gguf_file import GgufFile
from megatron_runtime.model.weights import LoadProgress

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA = {"sliding_window": 6, "query_pre_attn_scalar": 16}
CLOSE = {"atol": 1e-4, "rtol": 0.0}
WriteGguf = Callable[..., Path]


@pytest.fixture(scope="session")
def random_model(random_model: Callable[..., Any]) -> Callable[..., Any]:
    """Of sizes that the blocks of 32 divide."""
    return partial(random_model, std=0.1, **SIZES)


@torch.inference_mode()
def assert_same_logits(path: Path, model: Any, paged_requests: Any) -> None:
    tokens = list(range(1, 40))
    expected = model(torch.tensor([tokens])).logits[0]
    logits = paged_requests(load_model(path)).forward({"it": tokens})["it"]
    torch.testing.assert_close(logits, expected, **CLOSE)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 32}),
        ("Gemma", {}),
        ("Gemma2", GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
        ("Gemma3", GEMMA | {"num_hidden_layers": 7}),
    ],
)
def test_a_converted_model_has_the_logits_of_the_original(
    family: str, changes: dict[str, Any], tmp_path: Path, write_gguf: WriteGguf, paged_requests: Any, random_model: Any
) -> None:
    model = random_model(family, **changes)
    assert_same_logits(write_gguf(tmp_path / "model.gguf", model), model, paged_requests)


def test_gemma_3_scales_the_rotary_frequencies_of_its_global_layers_alone(
    tmp_path: Path, write_gguf: WriteGguf, paged_requests: Any, random_model: Any
) -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    model = random_model("Gemma3", num_hidden_layers=6, rope_parameters=rope, **GEMMA)

    def scaling(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    assert_same_logits(write_gguf(tmp_path / "model.gguf", model, metadata=scaling), model, paged_requests)


@pytest.mark.parametrize(
    ("family", "layers", "per_head"), [("gemma2", 26, 16), ("gemma2", 46, 8), ("gemma3", 34, 16), ("gemma3", 62, 8)]
)
def test_the_scale_of_gemma_s_scores_is_told_by_its_number_of_layers(
    family: str, layers: int, per_head: int, tmp_path: Path
) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", family)
    writer.add_block_count(layers)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_vocab_size(10)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    config = gguf_config(GgufFile(tmp_path / "model.gguf"))
    assert config.attention_scale == pytest.approx(per_head**-0.5)
    assert config.layer_windows == ()


def test_the_rotary_factors_of_llama_3_are_applied(
    tmp_path: Path, write_gguf: WriteGguf, paged_requests: Any, random_model: Any
) -> None:
    model = random_model(rope_parameters=LLAMA_3)
    plain = 500.0 ** (-torch.arange(0, 16, 2).float() / 16)
    factors = plain / model.model.rotary_emb.inv_freq
    assert_same_logits(write_gguf(tmp_path / "model.gguf", model, rope_factors=factors), model, paged_requests)


def test_linear_rotary_scaling_is_applied(
    tmp_path: Path, write_gguf: WriteGguf, paged_requests: Any, random_model: Any
) -> None:
    model = random_model(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0})

    def scaling(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    assert_same_logits(write_gguf(tmp_path / "model.gguf", model, metadata=scaling), model, paged_requests)


@pytest.mark.parametrize("kind", sorted(gguf.quants._type_traits), ids=lambda kind: kind.name)
def test_every_type_is_dequantized_piece_by_piece_as_the_package_does_at_once(
    kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (6, 2 * size), dtype=np.uint8)
    writer = GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "one.gguf")
    tensor = file.tensors["token_embd.weight"]
    assert tensor.shape == (6, 2 * elements)
    with np.errstate(all="ignore"):
        pieces = np.concatenate([file.rows(tensor, slice(start, start + 2)) for start in (0, 2, 4)])
        np.testing.assert_array_equal(pieces, gguf.quants.dequantize(raw, kind))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_quantized_weights_are_loaded_in_row_order(
    kind: str, tmp_path: Path, write_gguf: WriteGguf, random_model: Any
) -> None:
    model = random_model()
    path = write_gguf(tmp_path / "model.gguf", model, kind=GGMLQuantizationType[kind])
    weights = load_model(path).destinations()
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"):
        original = model.state_dict()[name]
        stored = gguf.quants.quantize(original.numpy(), GGMLQuantizationType[kind])
        expected = gguf.quants.dequantize(stored, GGMLQuantizationType[kind])
        np.testing.assert_array_equal(weights[name].numpy(), expected)


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


def test_progress_grows_to_the_bytes_that_are_stored(tmp_path: Path, write_gguf: WriteGguf, random_model: Any) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(), kind=GGMLQuantizationType.Q8_0)
    seen: list[LoadProgress] = []
    load_model(path, on_progress=seen.append)
    loaded = [progress.loaded_bytes for progress in seen]
    assert loaded == sorted(loaded)
    assert seen[-1].loaded_bytes == seen[-1].total_bytes == inspect_checkpoint(path).weight_bytes


def complaint(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_file_of_another_format_is_refused_with_what_it_starts_with(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 a zip file")
    assert r"is no GGUF file: it starts with b'PK\x03\x04', expected b'GGUF'. Name a .gguf file" in complaint(path)


def test_an_unknown_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + (9).to_bytes(4, "little") + bytes(16))
    assert "GGUF version 9 found, expected 2 or 3" in complaint(path)


def test_a_file_that_lost_its_end_says_how_much_is_there_and_how_much_should_be(
    tmp_path: Path, write_gguf: WriteGguf, random_model: Any
) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model())
    whole = path.read_bytes()
    path.write_bytes(whole[:-5000])
    assert f"is truncated: {len(whole) - 5000:,} bytes found, " in complaint(path)
    assert "Fetch the file again" in complaint(path)


def test_a_file_cut_anywhere_is_refused_with_words(tmp_path: Path, write_gguf: WriteGguf, random_model: Any) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model())
    whole = path.read_bytes()
    for length in [*range(300), *range(300, len(whole) - 100, 997)]:
        path.write_bytes(whole[:length])
        complaint(path)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(4, 2500), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_header_is_refused_with_words_or_does_no_harm(
    edits: list[tuple[int, int]], tmp_path: Path, write_gguf: WriteGguf, random_model: Any
) -> None:
    original = tmp_path / "original.gguf"
    if not original.exists():
        write_gguf(original, random_model(), metadata=add_tokenizer)
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
    leave_out: str, said: str, tmp_path: Path, write_gguf: WriteGguf, random_model: Any
) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(), leave_out=[leave_out])
    assert said in complaint(path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.expert_count", 8, "a mixture of 8 experts, expected a dense model"),
        ("split.count", 3, "is one of 3 parts, expected a whole model. Merge it"),
        ("llama.rope.dimension_count", 8, "llama.rope.dimension_count is 8, only 16 is supported"),
    ],
)
def test_a_kind_of_model_that_is_not_built_is_refused(
    key: str, value: int, said: str, tmp_path: Path, write_gguf: WriteGguf, random_model: Any
) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model(), metadata=lambda writer: writer.add_uint32(key, value))
    assert said in complaint(path)


def test_an_unknown_architecture_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    said = complaint(tmp_path / "model.gguf")
    assert "architecture 'mamba' is not known; the known ones are llama, mistral, qwen2, qwen3" in said


def test_a_type_that_can_not_be_dequantized_is_named(tmp_path: Path, write_gguf: WriteGguf, random_model: Any) -> None:
    def wide_norm(writer: GGUFWriter) -> None:
        writer.add_tensor("output_norm.weight", np.ones(SIZES["hidden_size"], dtype=np.float64))

    path = write_gguf(tmp_path / "model.gguf", random_model(), leave_out=["model.norm.weight"], metadata=wide_norm)
    assert "tensor output_norm.weight has type F64, which can't be dequantized. Choose another" in complaint(path)


def test_a_configuration_with_more_layers_than_tensors_takes_no_memory(
    tmp_path: Path, write_gguf: WriteGguf, random_model: Any
) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model())
    data = path.read_bytes()
    key = b"llama.block_count" + gguf.GGUFValueType.UINT32.to_bytes(4, "little")
    path.write_bytes(data.replace(key + (2).to_bytes(4, "little"), key + (10**6).to_bytes(4, "little")))
    assert "1,000,000 layers expected by the configuration, but only 21 tensors found" in complaint(path)
