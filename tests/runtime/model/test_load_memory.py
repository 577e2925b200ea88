"""Loading needs at most the memory of the model and of one shard, as measured by the kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runtime_support import model_scenarios
from runtime_support.quantized_safetensors import quantize_folder, to_float8
from runtime_support.rank_processes import run_ranks
from suite_support.worker import free_port

from megatron_runtime.parallel.layout import ParallelSizes

MIB = 2**20
BY_BLOCKS = to_float8((128, 128), name="weight_scale_inv")
SHARD = 20 * MIB
SLACK = {"safetensors": 12 * MIB, "gguf": 12 * MIB, "float8": 16 * MIB}
"""For a chunk of a tensor, and large pages that are not full; in fp8 a chunk is expanded in several steps. Less than a
second shard, than all shards in fp8, and than the holes of packed matrices in the C library's heap.
"""
LARGE = {
    "vocab_size": 2000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("Llama", ParallelSizes()),
        ("Llama", ParallelSizes(tensor=2)),
        ("Llama", ParallelSizes(pipeline=2)),
        ("Mixtral", ParallelSizes(tensor=2, expert=2)),
    ],
    ids=["alone", "tensor", "pipeline", "expert"],
)
@pytest.mark.parametrize("form", ["safetensors", "gguf", "float8"])
def test_a_rank_peaks_at_its_part_and_one_shard(
    form: str, family: str, sizes: ParallelSizes, tmp_path: Path, random_model: Any, write_gguf: Any
) -> None:
    large = LARGE | ({"num_local_experts": 4, "intermediate_size": 384} if family == "Mixtral" else {})
    models = {"small": random_model(family), "large": random_model(family, **large)}
    shards = [0]
    for name, model in models.items():
        if form == "gguf":
            write_gguf(tmp_path / name, model)
        elif form == "float8":
            model.save_pretrained(tmp_path / f"plain-{name}")
            folder = quantize_folder(tmp_path / f"plain-{name}", BY_BLOCKS, {"quant_method": "fp8"}, files=5).quantized
            folder.rename(tmp_path / name)
            shards = [path.stat().st_size for path in (tmp_path / name).glob("*.safetensors")]
        else:
            model.save_pretrained(tmp_path / name, max_shard_size=SHARD)
            shards = [path.stat().st_size for path in (tmp_path / name).glob("*.safetensors")]
    assert form == "gguf" or len(shards) > 4
    ranks = sizes.ranks_per_replica_group
    part = 4 * models["large"].num_parameters() / ranks
    paths = (tmp_path / "small", tmp_path / "large")
    for measured in run_ranks(model_scenarios.measure_load, ranks, sizes, free_port(), *paths):
        assert 0.9 * part < measured["weights"] < 1.1 * part
        assert 0.9 * measured["weights"] < measured["peak"] < measured["weights"] + max(shards) + SLACK[form]
