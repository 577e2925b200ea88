"""The preflight computes the bytes of the weights that a rank then has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_runtime.launch.inspection import CheckpointFacts, InspectionOptions, _inspect
from megatron_runtime.launch.memory import AvailableMemory
from megatron_runtime.launch.options import EngineOptions, LaunchOptions, ModelSource
from megatron_runtime.launch.preflight import plan_engine
from megatron_runtime.model.activations import activation_elements
from megatron_runtime.model.checkpoint import inspect_checkpoint
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.shard import Shard
from megatron_runtime.parallel.layout import ParallelSizes
from megatron_runtime.parallel.single_rank import SingleRank

GLM_4_5 = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}
PLENTY = AvailableMemory(2**40, "free")


def held_bytes(config: Any, sizes: ParallelSizes, rank: int) -> int:
    """Of the weights of one rank, which are not loaded."""
    ranks = SingleRank()
    ranks.position = sizes.position_in_replica_group(rank)
    decoder = Decoder(config, dtype=torch.float32, device="meta", ranks=ranks)
    return sum(view.nbytes for view in decoder.destinations().values())


@pytest.mark.parametrize(
    "sizes",
    [
        ParallelSizes(),
        ParallelSizes(tensor=4),
        ParallelSizes(tensor=4, expert=2),
        ParallelSizes(expert=4),
        ParallelSizes(tensor=2, expert=8),
    ],
    ids=str,
)
def test_a_rank_holds_what_the_preflight_expects(sizes: ParallelSizes, tmp_path: Path, save_model: Any) -> None:
    save_model(tmp_path, "Glm4Moe", **GLM_4_5)
    engine = EngineOptions(
        dtype="float32", tensor_parallel=sizes.tensor, expert_parallel=sizes.expert, kv_cache_bytes=2**30
    )
    found = _inspect(InspectionOptions(str(tmp_path), None, None, None, engine))
    assert isinstance(found, CheckpointFacts)
    assert engine.ranks_per_replica_group == sizes.ranks_per_replica_group
    plan = plan_engine(LaunchOptions(model=ModelSource(path=tmp_path), engine=engine), found, PLENTY)
    config = inspect_checkpoint(tmp_path).config
    held = max(held_bytes(config, sizes, rank) for rank in range(sizes.ranks_per_replica_group))
    # Norms and routers, which are small, are on every rank.
    assert 0.97 * held < plan.weight_bytes <= held


def test_the_estimate_of_a_pass_covers_the_tensors_of_a_layer(tmp_path: Path, save_model: Any) -> None:
    """In the wide layers of the reserve's estimate: dense channels, the visits of experts, and heads."""
    save_model(tmp_path, "Glm4Moe", **GLM_4_5)
    config = inspect_checkpoint(tmp_path).config
    assert config.experts is not None
    whole = activation_elements(Shard(config))
    experts = config.experts.per_token * (2 * config.experts.intermediate_size + config.hidden_size)
    assert whole > max(2 * config.intermediate_size, experts) + config.hidden_size
    half = activation_elements(Shard(config, ParallelSizes(tensor=2).position_in_replica_group(0)))
    assert whole / 2 < half < whole
