"""Errors in a checkpoint folder are reported with the file, the actual and expected value, and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_runtime.errors import CheckpointError, ConfigurationError
from megatron_runtime.model.checkpoint import inspect_checkpoint, load_model
from megatron_runtime.model.formats.source import resolve_source
from megatron_runtime.model.weights import LoadProgress

SETTINGS: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SETTINGS))
    model.save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value != "ABSENT"}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def complaint(folder: Path) -> str:
    """The errors of both ways to open the checkpoint."""
    with pytest.raises(CheckpointError) as inspected:
        inspect_checkpoint(folder)
    with pytest.raises(CheckpointError) as loaded:
        load_model(folder, dtype="float32")
    assert str(inspected.value) == str(loaded.value)
    assert str(folder) in str(loaded.value)
    return str(loaded.value)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "tensor model.layers.1.mlp.up_proj.weight missing" in complaint(folder)


def test_a_left_over_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.layers.0.surprise": torch.zeros(1)}))
    assert "tensor model.layers.0.surprise found that the configuration does not have" in complaint(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(17)}))
    assert "tensor model.norm.weight has shape [17], but the configuration expects [16]" in complaint(folder)


def test_many_missing_tensors_are_counted_and_the_first_are_named(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=4)
    said = complaint(folder)
    assert "18 tensors: model.layers.2." in said
    assert "and others missing" in said


def test_a_quantized_tensor_is_refused_with_its_type(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(16, dtype=torch.int8)}))
    assert "tensor model.norm.weight has type I8, expected one of F64, F32, F16, BF16" in complaint(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    said = complaint(folder)
    assert f"{path}: can't be read as safetensors" in said
    assert "Fetch the file again" in said


def test_a_missing_shard_is_named(folder: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SETTINGS))
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="6KB")
    victim = sorted(folder.glob("model-*.safetensors"))[1]
    victim.unlink()
    assert f"{victim.name} missing, named by model.safetensors.index.json" in complaint(folder)


def test_a_folder_without_a_checkpoint_is_refused_with_the_supported_formats(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json found" in complaint(folder)


def test_an_unknown_architecture_is_refused_with_the_known_ones(folder: Path) -> None:
    edit_config(folder, model_type="mamba")
    assert "architecture 'mamba' is not known; the known ones are llama, mistral, ministral, ministral3" in complaint(
        folder
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": "ABSENT"}, "hidden_size is missing, expected an integer"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide', expected an integer"),
        ({"num_hidden_layers": 0}, "number of layers is 0, expected 1 to"),
        ({"num_key_value_heads": 3}, "4 attention heads can't share 3 key/value heads evenly"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish', the known ones are silu, swish, gelu"),
        ({"rope_parameters": {"rope_type": "twisted"}}, "rope type 'twisted' is not known; the known ones are default"),
        (
            {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 0}},
            "original_max_position_embeddings is 0, expected 1 or more",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}},
            "yarn with a rope theta of 1.0, expected one above 1",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing, expected a number"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_configuration_that_can_not_be_built_names_the_field(
    folder: Path, changes: dict[str, Any], said: str
) -> None:
    edit_config(folder, **changes)
    assert said in complaint(folder)


def test_older_files_spell_the_rotary_settings_otherwise(folder: Path) -> None:
    edit_config(folder, rope_parameters="ABSENT", rope_theta=12345, rope_scaling={"type": "linear", "factor": 2})
    config = inspect_checkpoint(folder).config
    assert config.rope_theta == 12345.0
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("linear", 2.0)


def test_a_configuration_that_is_no_json_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "config.json: is not JSON" in complaint(folder)


def test_a_path_that_does_not_exist_is_refused_with_the_remedy(tmp_path: Path) -> None:
    assert "does not exist. Name a GGUF file, or the folder" in complaint(tmp_path / "nowhere")


def test_links_to_files_that_do_not_exist_are_named(folder: Path) -> None:
    link = folder.parent / "model"
    link.symlink_to("nowhere")
    assert f"{link}: is a link to nowhere, which does not exist. Fetch the file again" in complaint(link)
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
        (folder / name).symlink_to(f"../blobs/{name}")
        assert f"{name}: is a link to ../blobs/{name}, which does not exist" in complaint(folder)


def test_an_empty_folder_is_refused_with_the_expected_files(tmp_path: Path) -> None:
    assert "neither config.json nor a .gguf file found" in complaint(tmp_path)


def test_a_folder_with_several_gguf_files_is_refused_with_their_names(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert "holds several GGUF files (a.gguf, b.gguf). Name one of them" in complaint(tmp_path)


def test_buffers_of_old_checkpoints_and_the_copy_of_a_tied_head_are_ignored(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=True)
    edit_weights(
        folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
    )
    decoder = load_model(folder, dtype="float32")
    assert "model.embed_tokens.weight" in decoder.destinations()
    assert "lm_head.weight" not in decoder.destinations()


def test_progress_increases_to_the_total(folder: Path) -> None:
    seen: list[LoadProgress] = []
    load_model(folder, on_progress=seen.append, dtype="float32")
    loaded = [progress.loaded_bytes for progress in seen]
    assert loaded == sorted(loaded)
    assert seen[-1].loaded_bytes == seen[-1].total_bytes == inspect_checkpoint(folder).weight_bytes


def test_an_unknown_dtype_is_refused_with_the_known_ones(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="dtype is 'int4', expected one of auto, float32, bfloat16, float16"):
        load_model(folder, dtype="int4")


@pytest.mark.parametrize("length", [0, 65])
def test_a_length_beyond_that_of_the_model_is_refused(folder: Path, length: int) -> None:
    with pytest.raises(ConfigurationError, match=f"max_sequence_length is {length}, expected 1 to 64"):
        load_model(folder, max_sequence_length=length, dtype="float32")


def test_a_shorter_length_becomes_the_limit_of_the_model(folder: Path) -> None:
    assert load_model(folder, max_sequence_length=32, dtype="float32").config.max_position_embeddings == 32


def test_a_source_is_a_path_or_a_repository_and_not_both(folder: Path) -> None:
    assert resolve_source(path=folder) == folder
    for source in ({}, {"path": folder, "hf_repo": "owner/name"}):
        with pytest.raises(ConfigurationError, match="expected exactly one"):
            resolve_source(**source)


def test_a_failed_download_of_a_repository_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="repository owner/name at revision v1: the hub can't be reached"):
        resolve_source(hf_repo="owner/name", revision="v1")
    with pytest.raises(CheckpointError, match="is no valid name, expected the form owner/name"):
        resolve_source(hf_repo="not a repository")
