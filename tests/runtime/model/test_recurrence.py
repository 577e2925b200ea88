"""The recurrence of gated delta layers: its two implementations, and its independence of batches and chunks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from runtime_support.recurrent_plans import CLOSE, LENGTHS, garbage, mixed_config, plan_of, random
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from megatron_runtime.errors import CheckpointError, ConfigurationError
from megatron_runtime.model.attention_kind import attention_kind
from megatron_runtime.model.cache_layout import CacheLayout
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.recurrence import DeltaInputs, gated_rms_norm
from megatron_runtime.model.recurrent_config import GatedDeltaConfig
from megatron_runtime.model.recurrent_states import RecurrentStates
from megatron_runtime.model.shard import Shard
from megatron_runtime.parallel.layout import ParallelSizes, RankPosition

SIZES = GatedDeltaConfig(frozenset({0, 2}), key_heads=2, value_heads=6, key_dim=10, value_dim=14, taps=4)


def delta_inputs(count: int) -> DeltaInputs:
    keys, values = (count, SIZES.key_heads, SIZES.key_dim), (count, SIZES.value_heads, SIZES.value_dim)
    each = (SIZES.value_heads,)
    return DeltaInputs(
        queries=random(*keys),
        keys=random(*keys) + 0.5,
        values=random(*values),
        steps=random(count, *each) * 4,
        strengths=random(count, *each) + 1,
        rates=random(*each).exp(),
        biases=random(*each) - 1,
    )


def part(inputs: DeltaInputs, rows: slice) -> DeltaInputs:
    tokens = ("queries", "keys", "values", "steps", "strengths")
    return DeltaInputs(
        **{name: getattr(inputs, name)[rows] for name in tokens}, rates=inputs.rates, biases=inputs.biases
    )


def test_the_delta_rule_is_that_of_transformers() -> None:
    inputs, (_, shape) = delta_inputs(sum(LENGTHS)), SIZES.state_shapes
    compiled, plain = garbage(*shape), garbage(*shape)
    outputs = plan_of(LENGTHS).delta_rule(inputs, compiled)
    torch.testing.assert_close(plan_of(LENGTHS).delta_rule_in_torch(inputs, plain), outputs, **CLOSE)
    torch.testing.assert_close(plain, compiled, equal_nan=True, **CLOSE)
    begin = sum(LENGTHS[:-1])
    last = part(inputs, slice(begin, None))
    decays = -last.rates * torch.nn.functional.softplus(last.steps + last.biases)
    arguments = (last.queries, last.keys, last.values, decays, last.strengths.sigmoid())
    expected, state = torch_recurrent_gated_delta_rule(
        *(each[None] for each in arguments), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(outputs[begin:], expected[0], **CLOSE)
    torch.testing.assert_close(compiled[1], state[0], **CLOSE)
    assert compiled[0].isnan().all(), "no request has this slot"


def test_the_convolution_is_that_of_pytorch() -> None:
    inputs, weight, shape = random(sum(LENGTHS), SIZES.channels), random(4, SIZES.channels), SIZES.state_shapes[0]
    compiled, plain, bias = garbage(*shape), garbage(*shape), random(SIZES.channels)
    outputs = plan_of(LENGTHS).convolve(inputs, weight, bias, compiled)
    plain.nan_to_num_()  # zeros times NaN are NaN in PyTorch
    torch.testing.assert_close(plan_of(LENGTHS).convolve_in_torch(inputs, weight, bias, plain), outputs, **CLOSE)
    assert torch.equal(plain[1:], compiled[1:])
    rows = torch.nn.functional.pad(inputs[-30:].t(), (3, 0))[None]
    convolved = torch.nn.functional.conv1d(rows, weight.t()[:, None], bias, groups=SIZES.channels)[0].t()
    torch.testing.assert_close(outputs[-30:], torch.nn.functional.silu(convolved), **CLOSE)
    assert torch.equal(compiled[1], inputs[-3:])


@pytest.mark.parametrize("cuts", [(0, 30), (0, 1, 2, 3, 30), (0, 2, 17, 29, 30), (0, 16, 30)])
def test_bits_and_states_do_not_depend_on_chunks(cuts: tuple[int, ...]) -> None:
    inputs, rows, weight = delta_inputs(30), random(30, SIZES.channels), random(4, SIZES.channels)
    convolution, shape = SIZES.state_shapes

    def run(cuts: tuple[int, ...]) -> tuple[Tensor, ...]:
        states, matrices = garbage(*convolution), garbage(*shape)
        pieces = []
        for start, end in pairwise(cuts):
            plan, some = plan_of((end - start,), (end,)), slice(start, end)
            seen = plan.delta_rule(part(inputs, some), matrices)
            pieces.append((plan.convolve(rows[some], weight, weight[0], states), seen))
        return *map(torch.cat, zip(*pieces, strict=True)), states[1], matrices[1]

    assert all(map(torch.equal, run(cuts), run((0, 30))))


def test_the_norm_with_a_gate() -> None:
    rows, gates, weight = random(9, 6, 14), random(6, 9, 14).transpose(0, 1), random(14)
    expected = torch.nn.functional.rms_norm(rows, (14,), weight, 1e-6) * torch.nn.functional.silu(gates)
    torch.testing.assert_close(gated_rms_norm(rows, gates, weight, 1e-6), expected, **CLOSE)


def test_states_move_to_the_host_and_back() -> None:
    states = RecurrentStates(SIZES, 3, torch.device("cpu"))
    assert states.num_bytes == 3 * SIZES.state_bytes
    states.layer(1)[0].fill_(2.0)
    states.offload()
    states.restore()
    assert torch.equal(states.layer(1)[0], torch.full((3, 3, SIZES.channels), 2.0))
    states.release()
    states.restore()
    assert not states.layer(1)[0].any()


LAYOUT = CacheLayout(num_layers=1, heads=1, key_width=8, value_width=8, state_bytes=1000)
"""A block of four float32 tokens has 256 bytes."""


@pytest.mark.parametrize(
    ("size", "sequences", "is_chosen", "expected", "with_snapshots"),
    [
        (1256, 10, False, (1, 1, 0), (1, 1, 0)),
        (10000, 10, False, (5, 19, 0), (4, 19, 1)),
        (10000, 2, False, (2, 31, 0), (2, 27, 1)),
        (10000, 7, True, (7, 11, 0), (7, 11, 0)),
        (10000, 4, True, (4, 23, 0), (4, 19, 1)),
        (10000, 100, True, (7, 11, 0), (7, 11, 0)),
    ],
)
def test_a_pool_is_divided_into_states_blocks_and_snapshots(
    size: int,
    sequences: int,
    is_chosen: bool,
    expected: tuple[int, int, int],
    with_snapshots: tuple[int, int, int],
) -> None:
    assert LAYOUT.smallest_pool(256) == 1256
    assert LAYOUT.divide(size, 256, sequences, is_chosen=is_chosen) == expected
    assert LAYOUT.divide(size, 256, sequences, is_chosen=is_chosen, has_snapshots=True) == with_snapshots


@pytest.mark.parametrize(("least_blocks", "snapshots"), [(19, 1), (20, 0), (100, 0)])
def test_snapshots_leave_the_blocks_of_the_longest_sequence(least_blocks: int, snapshots: int) -> None:
    shares = LAYOUT.divide(10000, 256, 4, is_chosen=True, has_snapshots=True, least_blocks=least_blocks)
    assert shares == (4, 23 if not snapshots else 19, snapshots)


def model_config(**changes: Any) -> ModelConfig:
    """Three layers, the second of them with attention; ``changes`` are fields of the recurrent layers."""
    return mixed_config(num_layers=3, recurrent=replace(SIZES, **changes))


def test_ranks_divide_key_heads_with_their_value_heads() -> None:
    shards = [Shard(model_config(), RankPosition(ParallelSizes(tensor=2), rank)) for rank in range(2)]
    assert [shard.recurrent_key_heads(SIZES) for shard in shards] == [range(1), range(1, 2)]
    assert [shard.recurrent_value_heads(SIZES) for shard in shards] == [range(3), range(3, 6)]
    for shard in shards:
        layout = attention_kind(shard.cache_config).cache_layout
        assert (layout.num_layers, layout.state_bytes) == (1, SIZES.state_bytes // 2)


def test_more_ranks_than_key_heads_are_refused() -> None:
    words = r"size is 2, .* 2 key/value heads, 1 key heads \(groups\) in recurrent layers, .*; use one of 1$"
    with pytest.raises(ConfigurationError, match=words) as error:
        Shard(model_config(key_heads=1), RankPosition(ParallelSizes(tensor=2)))
    assert error.value.field == "tensor"


def test_only_layers_with_attention_have_blocks() -> None:
    layout = attention_kind(model_config()).cache_layout
    assert (layout.num_layers, layout.state_bytes) == (1, SIZES.state_bytes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"value_heads": 5}, "5 value heads can't share 2 key heads evenly; expected a multiple"),
        ({"taps": 1}, "taps of the convolution less one: 0, expected 1 to"),
        ({"layers": frozenset({0, 1, 2})}, "3 of 3 layers are recurrent, expected 1 to 2"),
    ],
)
def test_wrong_sizes_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=f"^here: {words}"):
        model_config(**changes).check("here")
