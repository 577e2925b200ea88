"""Loading takes at most the memory of the model and of one shard, measured from outside Python's own accounts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from runtime_support import model_scenarios
from runtime_support.rank_processes import free_port, run_ranks

from megatron_runtime.parallel.layout import ParallelSizes

MIB = 2**20
SLACK = 7 * MIB
"""For what the allocator keeps and the code that is paged in; less than a second shard, which would be seen."""
FORKED = 8 * MIB
"""For pages that a forked process has in common with others until it writes to them."""
ATTEMPTS = 4
"""The kernel may take pages of code from a process at any time, which are then paged in again while it is measured."""
LARGE = {
    "vocab_size": 2000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
MEASURE = """
    import re, sys
    from pathlib import Path
    import torch
    from megatron_runtime.model.checkpoint import load_model

    def resident(name):
        return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

    torch.set_num_threads(1)
    load_model(sys.argv[1], dtype="float32")  # what is imported and allocated once
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    model = load_model(sys.argv[2], dtype="float32")
    print(resident("VmHWM") - before)
"""


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("Llama", ParallelSizes(tensor=2)),
        ("Llama", ParallelSizes(pipeline=2)),
        ("Mixtral", ParallelSizes(tensor=2, expert=2)),
    ],
    ids=["tensor", "pipeline", "expert"],
)
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_a_rank_peaks_at_its_part_and_one_shard(
    form: str, family: str, sizes: ParallelSizes, tmp_path: Path, random_model: Any, write_gguf: Any
) -> None:
    large = LARGE | ({"num_local_experts": 4, "intermediate_size": 384} if family == "Mixtral" else {})
    models = {"small": random_model(family), "large": random_model(family, **large)}
    beside = 0
    for name, model in models.items():
        if form == "gguf":
            write_gguf(tmp_path / name, model)
        else:
            model.save_pretrained(tmp_path / name, max_shard_size="10MB")
            beside = max(path.stat().st_size for path in (tmp_path / name).glob("*.safetensors"))
    paths = (tmp_path / "small", tmp_path / "large")
    whole = 4 * models["large"].num_parameters()
    excess = []
    while len(excess) < ATTEMPTS and not (excess and excess[-1] <= 0):
        found = run_ranks(model_scenarios.measure_load, 2, sizes, free_port(), *paths)
        for measured in found:
            assert 0.45 * whole < measured["weights"] < 0.55 * whole
            assert measured["peak"] > 0.9 * measured["weights"]
        most = beside + SLACK + FORKED
        excess.append(max(measured["peak"] - measured["weights"] - most for measured in found))
    assert excess[-1] <= 0, f"bytes too many, in each attempt: {excess}"


def test_loading_peaks_at_the_model_and_one_shard(tmp_path: Path, random_model: Any) -> None:
    random_model("Llama").save_pretrained(tmp_path / "small")
    model = random_model("Llama", **LARGE)
    model.save_pretrained(tmp_path / "large", max_shard_size="10MB")
    shards = [path.stat().st_size for path in (tmp_path / "large").glob("model-*.safetensors")]
    assert len(shards) > 6
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path / "small"), str(tmp_path / "large")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    weights = 4 * model.num_parameters()
    assert weights <= int(outcome.stdout) <= weights + max(shards) + SLACK
