"""The part of a model on each rank, and unsupported divisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.config import ExpertsConfig, ModelConfig
from megatron_runtime.model.shard import Shard
from megatron_runtime.parallel.layout import ParallelSizes

SMOLLM2 = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_attention_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    attention_output_bias=True,
)
EXPERTS = ExpertsConfig(count=6, per_token=2, intermediate_size=24)


def shards(sizes: ParallelSizes, **changes: Any) -> list[Shard]:
    config = ModelConfig(**(vars(SMOLLM2) | changes))
    return [Shard(config, sizes.position_in_replica_group(rank)) for rank in range(sizes.ranks_per_replica_group)]


def test_query_heads_are_on_the_rank_of_their_key_heads() -> None:
    found = shards(ParallelSizes(tensor=3))
    assert [(shard.query_heads, shard.kv_heads) for shard in found] == [
        (range(3 * rank, 3 * rank + 3), range(rank, rank + 1)) for rank in range(3)
    ]
    assert [shard.local.queries_per_kv_head for shard in found] == [3] * 3


def test_key_heads_that_are_fewer_than_the_ranks_are_on_several() -> None:
    found = shards(ParallelSizes(tensor=4), num_attention_heads=8, num_kv_heads=2)
    assert [shard.kv_heads for shard in found] == [range(0, 1), range(0, 1), range(1, 2), range(1, 2)]
    assert [shard.query_heads.start for shard in found] == [0, 2, 4, 6]


def test_every_part_is_somewhere_and_a_sum_s_bias_once() -> None:
    found = shards(ParallelSizes(tensor=3), vocab_size=100, intermediate_size=100)
    assert [row for shard in found for row in shard.vocabulary] == list(range(100))
    assert [channel for shard in found for channel in shard.channels] == list(range(100))
    assert found[0].vocabulary_widths == [34, 33, 33]
    assert [shard.local.attention_output_bias for shard in found] == [True, False, False]


def test_layers_are_divided_evenly_or_as_given() -> None:
    assert [shard.layers for shard in shards(ParallelSizes(pipeline=4))] == [
        range(8),
        range(8, 16),
        range(16, 23),
        range(23, 30),
    ]
    given = shards(ParallelSizes(pipeline=2, stage_layers=(12, 18)))
    assert [shard.layers for shard in given] == [range(12), range(12, 30)]
    assert [shard.cache_config.num_layers for shard in given] == [12, 18]
    assert {shard.largest_cache_config.num_layers for shard in given} == {18}


def test_a_cache_holds_the_heads_that_are_here() -> None:
    (first, *_) = shards(ParallelSizes(tensor=3, pipeline=2))
    assert (first.cache_config.num_kv_heads, first.cache_config.num_layers) == (1, 15)
    (alone,) = shards(ParallelSizes())
    assert alone.cache_config == alone.config == alone.largest_cache_config


def test_experts_are_divided_first_and_sliced_after() -> None:
    found = shards(ParallelSizes(tensor=4, expert=2), num_attention_heads=8, num_kv_heads=4, experts=EXPERTS)
    assert [(shard.experts(EXPERTS), shard.expert_channels(EXPERTS)) for shard in found] == [
        (range(0, 3), range(0, 12)),
        (range(0, 3), range(12, 24)),
        (range(3, 6), range(0, 12)),
        (range(3, 6), range(12, 24)),
    ]


def test_expert_ranks_beyond_the_tensor_ranks_hold_whole_experts_and_copies_of_the_rest() -> None:
    experts = replace(EXPERTS, count=8, shared_intermediate_size=10)
    sizes = ParallelSizes(tensor=2, expert=4)
    found = shards(sizes, num_attention_heads=8, num_kv_heads=4, experts=experts)
    assert [(shard.experts(experts), shard.expert_channels(experts)) for shard in found] == [
        (range(start, start + 2), range(24)) for start in (0, 2, 4, 6)
    ]
    assert [(shard.query_heads, shard.channels) for shard in found] == [
        (range(0, 4), range(0, 768)),
        (range(4, 8), range(768, 1536)),
    ] * 2
    assert [len(shard.shared_expert_channels(experts)) for shard in found] == [3, 3, 2, 2]


@pytest.mark.parametrize(
    ("sizes", "changes", "field", "complaint"),
    [
        (
            ParallelSizes(tensor=2),
            {},
            "tensor",
            "size is 2, .* 9 attention heads on 3 key/value heads.* use one of 1, 3, 9$",
        ),
        (ParallelSizes(tensor=6), {"num_attention_heads": 12, "num_kv_heads": 4}, "tensor", "use one of 1, 2, 4, 12$"),
        (ParallelSizes(tensor=3), {"vocab_size": 2}, "tensor", "and 2 tokens; use one of 1$"),
        (ParallelSizes(pipeline=31), {}, "pipeline", "size is 31, but the model has 30 layers; use 30 or less"),
        (ParallelSizes(pipeline=2, stage_layers=(9, 9)), {}, "stage_layers", "18 layers together, .* has 30"),
        (ParallelSizes(tensor=3, expert=3), {}, "expert", "size is 3, but the model has no experts; use 1"),
        (
            ParallelSizes(tensor=9, expert=9),
            {"experts": EXPERTS},
            "expert",
            "size is 9, but the model has 6 experts.*; use one of 1, 3 with a tensor parallel size of 9",
        ),
        (
            ParallelSizes(expert=4),
            {"experts": EXPERTS},
            "expert",
            "size is 4, but the model has 6 experts.*; use one of 1, 2, 3, 6 with a tensor parallel size of 1",
        ),
        (
            ParallelSizes(expert=6),
            {"experts": replace(EXPERTS, shared_intermediate_size=5)},
            "expert",
            "6 ranks share a layer, but its shared expert has an intermediate size of 5",
        ),
    ],
)
def test_impossible_sizes_are_refused_with_the_possible_ones(
    sizes: ParallelSizes, changes: dict[str, Any], field: str, complaint: str
) -> None:
    with pytest.raises(ConfigurationError, match=complaint) as refused:
        shards(sizes, **changes)
    assert refused.value.field == field


def test_unknown_stages_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"stage_layers is \[1, 2, 3\], expected 2 numbers of at least 1"):
        ParallelSizes(pipeline=2, stage_layers=(1, 2, 3))
