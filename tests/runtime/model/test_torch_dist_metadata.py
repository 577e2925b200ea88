"""The metadata of a torch_dist folder is read for every writer, without executing code."""

from __future__ import annotations

import pickle
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as distributed_checkpoint
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.formats.torch_dist_file import TorchDistFile
from megatron_runtime.model.formats.torch_dist_metadata import read_metadata

STATE = {
    "embedding.word_embeddings.weight": torch.arange(12.0).view(4, 3),
    "decoder.final_layernorm.weight": torch.ones(3),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The metadata of a folder that torch.distributed.checkpoint wrote."""
    with warnings.catch_warnings():  # it warns of one process even when told so
        warnings.simplefilter("ignore", UserWarning)
        distributed_checkpoint.save(dict(STATE), checkpoint_id=tmp_path, no_dist=True)
    return tmp_path / ".metadata"


def assert_same_tensors(folder: Path) -> None:
    file = TorchDistFile(folder)
    assert set(file.tensors) == set(STATE)
    for name, tensor in STATE.items():
        assert torch.equal(file.read(name, (), range(len(tensor))), tensor)


class Intruder:
    """A pickle that executes code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("hidden", [False, True], ids=["at the top", "in a record"])
def test_pickled_code_in_the_metadata_is_not_executed(hidden: bool, path: Path) -> None:
    intruder = Intruder(path.parent / "touched")
    path.write_bytes(pickle.dumps(SavePlan([], storage_data=intruder) if hidden else intruder))
    with pytest.raises(CheckpointError, match=r"\.metadata: is no metadata .*it names .*, which no such file needs"):
        read_metadata(path.parent)
    assert not (path.parent / "touched").exists()


def test_a_function_of_the_modules_that_are_passed_over_is_not_called(path: Path) -> None:
    asked = b"ctorch.distributed.checkpoint.filesystem\nos.unlink\n(S'" + str(path).encode() + b"'\ntR."
    path.write_bytes(asked)
    with pytest.raises(CheckpointError, match="holds no metadata of torch"):
        read_metadata(path.parent)
    assert path.exists()


def test_entries_that_megatron_adds_to_the_metadata_are_ignored(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["megatron", "core", "dist_checkpointing", "strategies", "torch"]
    modules = [types.ModuleType(".".join(names[: length + 1])) for length in range(len(names))]
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name, base in (("MCoreMetadata", Metadata), ("MCoreSavePlan", SavePlan)):
        setattr(modules[-1], name, type(name, (base,), {"__module__": modules[-1].__name__}))
    items = create_default_local_save_plan(STATE, is_coordinator=True).items
    plan = modules[-1].MCoreSavePlan(items, storage_data=_StoragePrefix("__0_"))
    added = modules[-1].MCoreMetadata(**vars(pickle.loads(path.read_bytes())))
    added.mcore_data = {"optimizer.state": {"nd_reformulated_orig_global_shape": (1, 2)}}
    added.all_local_plans = [plan]
    path.write_bytes(pickle.dumps(added))
    for name in (b"MCoreMetadata", b"MCoreSavePlan", b"WriteItemType"):
        assert name in path.read_bytes()
    monkeypatch.undo()
    assert_same_tensors(path.parent)


def test_the_records_of_an_older_torch_are_read(path: Path) -> None:
    found = pickle.loads(path.read_bytes())
    for stored in found.state_dict_metadata.values():
        stored.properties = TensorProperties(dtype=stored.properties.dtype)
    path.write_bytes(pickle.dumps(found))
    assert b"_shard.sharded_tensor.metadata" in path.read_bytes()
    assert_same_tensors(path.parent)


def test_damaged_metadata_is_refused_with_a_message(path: Path) -> None:
    whole = path.read_bytes()
    for length in range(0, len(whole) - 1, 97):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"\.metadata: is no metadata of torch.distributed.checkpoint"):
            read_metadata(path.parent)
