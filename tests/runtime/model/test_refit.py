"""New weights in a decoder in use: all or none, from any source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.checkpoint import load_model
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.refit import Weights, offload_weights, restore_weights, update_weights

CPU = torch.device("cpu")
SaveModel = Callable[..., Any]


@pytest.fixture(params=["Llama", "GPT2"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def checkpoints(tmp_path: Path, save_model: SaveModel, family: str) -> tuple[Path, Path]:
    """Two trainings of the same model."""
    save_model(tmp_path / "0", family)
    save_model(tmp_path / "1", family, std=0.5)
    return tmp_path / "0", tmp_path / "1"


def tensors(model: Decoder) -> dict[str, Tensor]:
    return {name: view.clone() for name, view in model.destinations().items()}


def assert_same(model: Decoder, expected: dict[str, Tensor]) -> None:
    found = tensors(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def in_one_file(checkpoint: Path) -> Weights:
    return str((checkpoint / "model.safetensors").rename(checkpoint.parent / "step.safetensors"))


def in_memory(checkpoint: Path) -> Weights:
    return tensors(load_model(checkpoint, dtype="float32"))


def in_a_folder(checkpoint: Path) -> Weights:
    return checkpoint


@pytest.mark.parametrize("source", [in_memory, in_one_file, in_a_folder])
def test_updated_weights_equal_loaded_weights(
    checkpoints: tuple[Path, Path], paged_requests: Callable[..., Any], source: Callable[[Path], Weights]
) -> None:
    model, other = (load_model(path, dtype="float32") for path in checkpoints)
    expected = paged_requests(other).continue_greedily({"a": [1, 2, 3]}, 8)
    assert paged_requests(model).continue_greedily({"a": [1, 2, 3]}, 8) != expected
    update_weights(model, source(checkpoints[1]))
    assert model.is_packed == other.is_packed
    assert_same(model, tensors(other))
    assert paged_requests(model).continue_greedily({"a": [1, 2, 3]}, 8) == expected


def test_weights_are_copied_to_where_they_lie_on_a_device(checkpoints: tuple[Path, Path]) -> None:
    plain = [Decoder(load_model(path).config, dtype=torch.float32) for path in checkpoints]
    for model, path in zip(plain, checkpoints, strict=True):
        update_weights(model, path)
    places = [parameter.data_ptr() for parameter in plain[0].parameters()]
    plain[0].copy_from(plain[1])
    assert [parameter.data_ptr() for parameter in plain[0].parameters()] == places
    assert_same(plain[0], tensors(plain[1]))


Change = Callable[[dict[str, Tensor], str], object]


def _poison(named: dict[str, Tensor], last: str) -> None:
    named[last].view(-1)[0] = float("nan")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda named, last: named.pop(last), "{last} missing"),
        (lambda named, _: named.update(surprise=torch.zeros(1)), "tensor surprise found"),
        (lambda named, last: named.update({last: torch.zeros(3, 5, 7)}), r"{last} has shape \[3, 5, 7\]"),
        (_poison, "numbers in tensor {last} are NaN"),
    ],
)
def test_weights_that_do_not_fit_are_reported_and_change_nothing(
    checkpoints: tuple[Path, Path], change: Change, complaint: str
) -> None:
    model, other = (load_model(path, dtype="float32") for path in checkpoints)
    before, named = tensors(model), tensors(other)
    last = list(named)[-1]
    change(named, last)
    with pytest.raises(CheckpointError, match=complaint.format(last=last)):
        update_weights(model, named)
    assert_same(model, before)


def test_the_weights_of_another_model_are_refused_with_the_difference(tmp_path: Path, save_model: SaveModel) -> None:
    save_model(tmp_path / "0", "Llama")
    save_model(tmp_path / "1", "Llama", num_hidden_layers=2)
    model = load_model(tmp_path / "0", dtype="float32")
    before = tensors(model)
    with pytest.raises(CheckpointError, match=f"{tmp_path / '1'}: num_layers is 2, but 3 in the model that is served"):
        update_weights(model, tmp_path / "1")
    with pytest.raises(CheckpointError, match="nowhere"):
        update_weights(model, tmp_path / "nowhere")
    assert_same(model, before)


def test_a_file_without_tensors_is_reported_and_changes_nothing(checkpoints: tuple[Path, Path]) -> None:
    model = load_model(checkpoints[0], dtype="float32")
    before = tensors(model)
    broken = checkpoints[1] / "broken.safetensors"
    broken.write_bytes(b"x" * 100)
    for path, complaint in (
        (broken, "can't be read as safetensors"),
        (broken.with_name("no.safetensors"), "not exist"),
    ):
        with pytest.raises(CheckpointError, match=f"{path}: .*{complaint}"):
            update_weights(model, path)
    assert_same(model, before)


def test_a_copy_of_a_tied_head_is_accepted(tmp_path: Path, save_model: SaveModel) -> None:
    original = save_model(tmp_path, "Llama", tie_word_embeddings=True)
    model = load_model(tmp_path, dtype="float32")
    named = {name: tensor.detach() * 2 for name, tensor in original.state_dict().items()}
    assert "lm_head.weight" in named
    update_weights(model, named)
    assert torch.equal(model.embedding.table, named["lm_head.weight"])


def test_released_weights_are_read_again_from_their_files(checkpoints: tuple[Path, Path]) -> None:
    model = load_model(checkpoints[0], dtype="float32")
    before = tensors(model)
    offload_weights(model)
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    restore_weights(model, CPU)
    assert_same(model, before)
    offload_weights(model)
    update_weights(model, checkpoints[1])
    restore_weights(model, CPU)
    assert_same(model, tensors(load_model(checkpoints[1], dtype="float32")))


def test_files_that_changed_meanwhile_are_not_taken_for_the_old_ones(checkpoints: tuple[Path, Path]) -> None:
    model = load_model(checkpoints[0], dtype="float32")
    offload_weights(model)
    weights = checkpoints[0] / "model.safetensors"
    weights.write_bytes((checkpoints[1] / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="changed since its weights were released"):
        restore_weights(model, CPU)
    update_weights(model, checkpoints[0])
    assert_same(model, tensors(load_model(checkpoints[1], dtype="float32")))


def test_other_files_in_the_folder_may_change(checkpoints: tuple[Path, Path]) -> None:
    log = checkpoints[0] / "server.log"
    log.write_text("before\n")
    model = load_model(checkpoints[0], dtype="float32")
    before = tensors(model)
    offload_weights(model)
    log.write_text("before and after\n")
    (checkpoints[0] / "notes.txt").touch()
    restore_weights(model, CPU)
    assert_same(model, before)


def test_weights_that_are_in_no_file_stay(checkpoints: tuple[Path, Path]) -> None:
    model, other = (load_model(path, dtype="float32") for path in checkpoints)
    update_weights(model, tensors(other))
    offload_weights(model)
    assert_same(model, tensors(other))
    restore_weights(model, CPU)
    assert_same(model, tensors(other))
