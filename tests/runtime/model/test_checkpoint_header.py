"""The preflight reads a checkpoint without torch, whose import would take longer than all else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_runtime.model.checkpoint import inspect_checkpoint

WRITTEN = Path(__file__).parent.parent / "data" / "megatron"
PROGRAM = """
import json
import sys
from dataclasses import asdict

from megatron_runtime.launch.inspection import InspectionOptions, _inspect
from megatron_runtime.launch.options import EngineOptions

facts = _inspect(InspectionOptions(sys.argv[1], None, None, None, EngineOptions()))
print(json.dumps({"facts": asdict(facts), "has_torch": "torch" in sys.modules}))
"""


def write(form: str, folder: Path, random_model: Any, write_gguf: Any) -> int:
    """Writes a checkpoint in this format; returns its number of parameters."""
    if form == "torch_dist":
        shutil.unpack_archive(WRITTEN / "two_ranks.zip", folder)
        return inspect_checkpoint(folder).num_parameters
    model = random_model("Llama")
    if form == "gguf":
        write_gguf(folder / "model.gguf", model)
    else:
        model.save_pretrained(folder)
    return int(model.num_parameters())


@pytest.mark.parametrize("form", ["gguf", "safetensors", "torch_dist"])
def test_a_preflight_imports_no_torch(form: str, tmp_path: Path, random_model: Any, write_gguf: Any) -> None:
    parameters = write(form, tmp_path, random_model, write_gguf)
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["facts"]["parameters"] == parameters
    assert not said["has_torch"]
