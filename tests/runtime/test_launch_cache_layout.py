"""The preflight counts on the bytes that the ranks' caches take, for every kind of attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support.small_facts import PLENTY
from runtime_support.tiny_checkpoint import write_tiny_checkpoint

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.launch.inspection import inspect_source
from megatron_runtime.launch.options import EngineOptions, LaunchOptions, ModelSource
from megatron_runtime.launch.preflight import plan_engine
from megatron_runtime.model.checkpoint import inspect_checkpoint
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.shard import Shard
from megatron_runtime.parallel.layout import ParallelSizes

KINDS: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "latents": {"has_latent_attention": True},
    "recurrent states": {"recurrent": "delta"},
}
SIZES = [{}, {"tensor": 2}, {"tensor": 4}, {"pipeline": 2}, {"tensor": 2, "pipeline": 3}]
CASES = [(kind, sizes) for kind in KINDS for sizes in SIZES if (kind, sizes) != ("recurrent states", {"tensor": 4})]
"""It has two key heads."""
LAYERS, BLOCK, BLOCKS, STATES = 5, 8, 6, 2


@pytest.mark.parametrize(("kind", "sizes"), CASES, ids=str)
async def test_the_preflight_counts_on_the_bytes_that_the_caches_take(
    kind: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    write_tiny_checkpoint(tmp_path, layers=LAYERS, **KINDS[kind])
    parallel = {f"{name}_parallel": size for name, size in sizes.items()}
    engine = EngineOptions(
        dtype="float32", block_size_tokens=BLOCK, max_requests=STATES, prefix_caching=False, **parallel
    )
    source = ModelSource(path=tmp_path)
    facts = await inspect_source(source, engine)
    largest = max(cache_bytes(tmp_path, ParallelSizes(**sizes)))
    assert facts.cache_layout.block_bytes(BLOCK, 4) * BLOCKS + facts.cache_layout.state_bytes * STATES == largest
    options = LaunchOptions(model=source, engine=replace(engine, kv_cache_bytes=largest))
    plan = plan_engine(options, facts, PLENTY)
    assert plan.max_sequence_length == BLOCK * BLOCKS


async def test_a_draft_model_is_inspected_whole(tmp_path: Path) -> None:
    model, draft = (write_tiny_checkpoint(tmp_path / str(layers), layers=layers) for layers in (LAYERS, 1))
    engine = EngineOptions(dtype="float32", tensor_parallel=2, speculative_draft_model=str(draft))
    facts = await inspect_source(ModelSource(path=model), engine)
    alone = await inspect_source(ModelSource(path=draft), EngineOptions(dtype="float32"))
    assert facts.draft == alone
    missing = replace(engine, speculative_draft_model=str(tmp_path))
    with pytest.raises(ConfigurationError, match=f"^--speculative-draft-model {tmp_path}: "):
        await inspect_source(ModelSource(path=model), missing)


def cache_bytes(path: Path, sizes: ParallelSizes) -> Iterator[int]:
    """What BLOCKS blocks and the states of STATES requests take on each rank, by their arrays."""
    config = inspect_checkpoint(path).config
    for rank in range(sizes.ranks_per_replica_group):
        shard = Shard(config, sizes.position_in_replica_group(rank))
        cache = KVCache(shard.cache_config, BLOCKS, BLOCK, torch.float32, num_states=STATES)
        taken = sum(array.nbytes for index in range(len(shard.layers)) for array in cache.layer(index))
        assert taken == cache.num_bytes
        yield taken
