"""The selective state space model of Mamba-2 layers, and models whose layers have one mixer each."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from runtime_support.recurrent_plans import CLOSE, LENGTHS, garbage, mixed_config, plan_of, random
from torch import Tensor
from transformers.models.nemotron_h.modeling_nemotron_h import (
    NemotronHRMSNormGated,
    mamba2_chunk_scan,
    mamba2_selective_state_update,
)

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.attention_kind import attention_kind
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.recurrence import ScanInputs, gated_group_norm
from megatron_runtime.model.recurrent_config import Mamba2Config
from megatron_runtime.model.shard import Shard
from megatron_runtime.parallel.layout import ParallelSizes, RankPosition

SIZES = Mamba2Config(frozenset({0}), key_heads=2, value_heads=6, key_dim=12, value_dim=10, taps=4)
LIMITS = [(0.0, math.inf), (0.3, 2.0)]
TOKENS = ("queries", "keys", "values", "steps")


def scan_inputs(count: int, limits: tuple[float, float] = LIMITS[0]) -> ScanInputs:
    """Steps of about 1e-5 to 7; the others are views of one tensor, as in the module."""
    mixed = random(count, SIZES.channels)
    values, keys, queries = torch.split(mixed, [SIZES.values, SIZES.keys, SIZES.keys], dim=1)
    each = (SIZES.value_heads,)
    return ScanInputs(
        queries=queries.view(count, SIZES.key_heads, SIZES.key_dim),
        keys=keys.view(count, SIZES.key_heads, SIZES.key_dim),
        values=values.view(count, SIZES.value_heads, SIZES.value_dim),
        steps=random(count, *each) * 4 - 2,
        rates=random(*each).exp(),
        biases=random(*each) - 1,
        skips=random(*each),
        limits=limits,
    )


def part(inputs: ScanInputs, rows: slice) -> ScanInputs:
    return replace(inputs, **{name: getattr(inputs, name)[rows] for name in TOKENS})


@pytest.mark.parametrize("limits", LIMITS)
def test_the_scan_is_that_of_transformers(limits: tuple[float, float]) -> None:
    inputs, (_, shape) = scan_inputs(sum(LENGTHS), limits), SIZES.state_shapes
    compiled, plain = garbage(*shape), garbage(*shape)
    outputs = plan_of(LENGTHS).selective_scan(inputs, compiled)
    torch.testing.assert_close(plan_of(LENGTHS).selective_scan_in_torch(inputs, plain), outputs, **CLOSE)
    torch.testing.assert_close(plain, compiled, equal_nan=True, **CLOSE)
    begin = sum(LENGTHS[:-1])
    last = part(inputs, slice(begin, None))
    expected, state = mamba2_chunk_scan(
        *(each[None] for each in (last.values, last.steps)),
        -last.rates,
        *(each[None] for each in (last.keys, last.queries)),
        chunk_size=8,
        D=last.skips,
        dt_bias=last.biases,
        dt_softplus=True,
        dt_limit=limits,
        return_final_states=True,
    )
    torch.testing.assert_close(outputs[begin:], expected[0], **CLOSE)
    torch.testing.assert_close(compiled[1], state[0].transpose(-1, -2), **CLOSE)
    assert compiled[0].isnan().all(), "no request has this slot"


def test_one_token_after_the_other_is_the_update_of_transformers() -> None:
    inputs, states = scan_inputs(9), garbage(*SIZES.state_shapes[1])
    state = torch.zeros(1, SIZES.value_heads, SIZES.value_dim, SIZES.key_dim)
    wide = (SIZES.value_heads, SIZES.value_dim)
    rates, biases, skips = (each[:, None].expand(wide) for each in (-inputs.rates, inputs.biases, inputs.skips))
    for row in range(9):
        one = part(inputs, slice(row, row + 1))
        outputs = plan_of((1,), (row + 1,)).selective_scan(one, states)
        expected = mamba2_selective_state_update(
            *(state, one.values, one.steps[..., None].expand(1, *wide), rates[..., None], one.keys, one.queries),
            D=skips,
            dt_bias=biases,
            dt_softplus=True,
        )
        torch.testing.assert_close(outputs, expected, **CLOSE)
    torch.testing.assert_close(states[1], state[0].transpose(-1, -2), **CLOSE)


@pytest.mark.parametrize("cuts", [(0, 30), (0, 1, 2, 3, 30), (0, 2, 17, 29, 30), (0, 16, 30)])
def test_bits_and_states_do_not_depend_on_chunks(cuts: tuple[int, ...]) -> None:
    inputs = scan_inputs(30)

    def run(cuts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        states = garbage(*SIZES.state_shapes[1])
        pieces = [
            plan_of((end - start,), (end,)).selective_scan(part(inputs, slice(start, end)), states)
            for start, end in pairwise(cuts)
        ]
        return torch.cat(pieces), states[1]

    assert all(map(torch.equal, run(cuts), run((0, 30))))


def test_a_nan_in_a_step_remains() -> None:
    inputs = scan_inputs(3, LIMITS[1])
    inputs.steps[1, 2] = torch.nan
    outputs = plan_of((3,)).selective_scan(inputs, garbage(*SIZES.state_shapes[1]))
    assert outputs.isnan().all(-1).nonzero().tolist() == [[1, 2], [2, 2]]


def test_the_norm_of_groups_with_a_gate() -> None:
    rows, gates = random(9, 2, 30), random(2, 9, 30).transpose(0, 1)
    theirs = NemotronHRMSNormGated(60, group_size=30, eps=1e-5)
    theirs.weight.data.copy_(random(60))
    expected = theirs(rows.flatten(1), gates.flatten(1)).view(rows.shape)
    weight = theirs.weight.data.view(2, 30)
    torch.testing.assert_close(gated_group_norm(rows.clone(), gates, weight, 1e-5), expected.detach(), **CLOSE)


def model_config(**changes: Any) -> ModelConfig:
    """Mamba-2, a feed-forward network, attention and another network, each in a layer of its own."""
    fields = {"num_layers": 4, "recurrent": SIZES, "feed_forward_layers": frozenset({1, 3})}
    return mixed_config(**(fields | changes))


def test_a_layer_has_the_cache_of_its_mixer() -> None:
    config = model_config()
    layout = attention_kind(config).cache_layout
    assert (layout.num_layers, layout.state_bytes) == (1, SIZES.state_bytes)
    cache = KVCache(config, 5, 4, torch.float32, num_states=3)
    shapes = [tuple(tuple(array.shape) for array in cache.layer(layer)) for layer in range(4)]
    assert shapes == [((3, 3, SIZES.channels), (3, 6, 12, 10)), (), ((5, 2, 4, 8), (5, 2, 4, 8)), ()]


def test_a_stage_has_the_caches_of_its_own_layers() -> None:
    stages = [Shard(model_config(), RankPosition(ParallelSizes(pipeline=2), rank)) for rank in range(2)]
    whole, first, last = (
        KVCache(config, 5, 4, torch.float32, num_states=3)
        for config in (model_config(), *(stage.cache_config for stage in stages))
    )
    assert [cache.layout.num_layers for cache in (first, last)] == [0, 1]
    assert first.num_bytes == 3 * SIZES.state_bytes == whole.num_bytes - last.num_bytes
    assert [len(cache.layer(layer)) for cache in (first, last) for layer in range(2)] == [2, 0, 2, 0]
    for stage in stages:
        layout = attention_kind(stage.largest_cache_config).cache_layout
        assert (layout.num_layers, layout.state_bytes) == (1, SIZES.state_bytes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"feed_forward_layers": frozenset({1, 2, 3})}, "none of 4 layers has attention, expected one or more"),
        ({"recurrent": replace(SIZES, step_limits=(0.2, 0.1))}, "the limits of time steps are 0.2 and 0.1, expected 0"),
        ({"recurrent": replace(SIZES, step_limits=(math.nan, 1.0))}, "the limits of time steps are nan and 1.0"),
        ({"recurrent": replace(SIZES, value_heads=5)}, "5 value heads can't share 2 key heads evenly; expected a mult"),
    ],
)
def test_wrong_sizes_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=f"^here: {words}"):
        model_config(**changes).check("here")
