"""Sampling: filters equal their definitions, frequencies match probabilities, rows are independent of their batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_runtime.engine.sampling.exponential_noise import BLOCK, block_minima, exponential_noise, noise_keys
from megatron_runtime.engine.sampling.filters import TRUNCATIONS
from megatron_runtime.engine.sampling.log_probs import LogProbs, log_probs
from megatron_runtime.engine.sampling.sampler import NO_TOKEN, processed_log_probs, sample
from megatron_runtime.engine.sampling.sampling_table import SamplingRules


def rules_of(seeds: Any, *, temperature: Any = 1.0, **numbers: Any) -> SamplingRules:
    """One row for each seed, with the numbers of the truncations by parameter."""
    keys = noise_keys(np.asarray(seeds, np.uint64), np.zeros(len(seeds), np.int64))
    unused = np.zeros(keys.shape)
    filters = [kind.of((unused + numbers.pop(kind.parameters[0], 0)).astype(kind.dtype)) for kind in TRUNCATIONS]
    assert not numbers
    return SamplingRules((unused + temperature).astype(np.float32), keys, tuple(filters))


def draw_often(logits: Tensor, count: int = 100_000, **filters: Any) -> Tensor:
    """The frequency of each token over this number of seeds; its standard deviation is at most 0.0016."""
    tokens = sample(logits.expand(count, -1), rules_of(np.arange(count), **filters))
    return torch.bincount(tokens, minlength=logits.shape[-1]) / count


def noise(keys: Any, vocabulary: int) -> Tensor:
    return exponential_noise(keys, torch.arange(vocabulary))


CPU = torch.device("cpu")
LOGITS = torch.tensor([1.0, 3.0, -2.0, 2.5, 0.0, 2.9, -30.0])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_frequencies_match_the_softmax_at_the_temperature(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    assert torch.allclose(draw_often(LOGITS, temperature=temperature), expected, atol=5e-3)


def test_temperature_zero_and_top_k_one_are_greedy() -> None:
    seeds = [0, 1, 2]
    logits = torch.tensor([[0.0, 5.0, 5.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert sample(logits, rules_of(seeds, temperature=0.0)).tolist() == [1, 0, 2]
    assert sample(logits, rules_of(seeds, top_k=1)).tolist() == [1, 0, 2]


@pytest.mark.parametrize("top_k", [2, 3, 7, 1000])
def test_top_k_keeps_the_k_most_likely_tokens(top_k: int) -> None:
    kept = LOGITS.topk(min(top_k, 7)).indices
    expected = torch.zeros(7)
    expected[kept] = LOGITS[kept].softmax(-1)
    assert torch.allclose(draw_often(LOGITS, top_k=top_k), expected, atol=5e-3)


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, 1), (0.4, 2), (0.8, 3), (0.97, 4), (1.0, 7), (0.0, 7)])
def test_top_p_keeps_the_fewest_most_likely_tokens_with_that_probability(top_p: float, kept: int) -> None:
    tokens = LOGITS.topk(kept).indices
    expected = torch.zeros(7)
    expected[tokens] = LOGITS[tokens].softmax(-1)
    assert torch.allclose(draw_often(LOGITS, top_p=top_p), expected, atol=5e-3)


def test_top_p_applies_to_the_tokens_that_top_k_keeps() -> None:
    # Of the three most likely, renormalized to about .38 .35 .27, two reach .7.
    tokens = LOGITS.topk(2).indices
    expected = torch.zeros(7)
    expected[tokens] = LOGITS[tokens].softmax(-1)
    assert torch.allclose(draw_often(LOGITS, top_k=3, top_p=0.7), expected, atol=5e-3)


def test_min_p_excludes_tokens_below_a_fraction_of_the_highest_probability() -> None:
    kept = LOGITS.softmax(-1) >= 0.5 * LOGITS.softmax(-1).max()
    expected = torch.where(kept, LOGITS.exp(), 0.0)
    assert torch.allclose(draw_often(LOGITS, min_p=0.5), expected / expected.sum(), atol=5e-3)


def test_top_p_of_a_flat_distribution_exceeds_the_first_ranked_width() -> None:
    frequencies = draw_often(torch.zeros(1000) - torch.arange(1000) * 1e-4, count=40_000, top_p=0.5)
    assert 480 <= int((frequencies > 0).sum()) <= 500
    assert frequencies[600:].sum() == 0


@given(
    rows=st.lists(
        st.tuples(
            st.floats(0, 3),
            st.integers(0, 12),
            st.floats(0, 1),
            st.floats(0, 1),
            st.integers(0, 2**64 - 1),
        ),
        min_size=1,
        max_size=8,
    ),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100)
def test_a_row_does_not_depend_on_the_other_rows(rows: list[tuple[float, int, float, float, int]], seed: int) -> None:
    logits = torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(seed)) * 3
    temperature, top_k, top_p, min_p, seeds = zip(*rows, strict=True)
    together = rules_of(seeds, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    alone = [sample(logits[i : i + 1], together.take(np.array([i]))).item() for i in range(len(rows))]
    assert sample(logits, together).tolist() == alone
    assert all(0 <= token < 300 for token in alone)


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 1e6])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    token = sample(LOGITS[None], rules_of([3], temperature=temperature)).item()
    assert token == 1 if temperature < 1 else 0 <= token < 7


def test_rows_that_are_not_finite_give_no_token_and_do_not_affect_other_rows() -> None:
    logits = torch.stack([LOGITS, LOGITS.clone().index_fill_(0, torch.tensor(3), torch.nan), LOGITS * torch.inf])
    for temperature in (0.0, 1.0):
        tokens = sample(logits, rules_of([5, 5, 5], temperature=temperature)).tolist()
        assert tokens[0] >= 0
        assert tokens[1:] == [NO_TOKEN, NO_TOKEN]


def test_excluded_tokens_are_never_sampled() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0]])
    assert set(sample(logits.expand(5000, -1), rules_of(range(5000))).tolist()) == {1, 3}


def test_rounding_differences_do_not_change_a_token() -> None:
    logits = torch.randn(200, 50_000, generator=torch.Generator().manual_seed(1))
    elsewhere = logits + torch.randn(200, 50_000, generator=torch.Generator().manual_seed(2)) * 1e-6
    rules = rules_of(range(200))
    assert sample(logits, rules).tolist() == sample(elsewhere, rules).tolist()


def test_noise_has_an_exponential_distribution() -> None:
    drawn = noise(noise_keys(np.arange(50, dtype=np.uint64), np.arange(50, dtype=np.int64)), 20_000).double()
    assert (drawn > 0).all()
    for limit in (1e-4, 0.01, 0.5, 1.0, 4.0):
        expected = 1 - np.exp(-limit)
        found = (drawn < limit).double().mean().item()
        assert found == pytest.approx(expected, abs=5 * np.sqrt(expected * (1 - expected) / drawn.numel()))


def test_the_minimum_of_a_block_is_that_of_its_tokens() -> None:
    keys = noise_keys(np.arange(200, dtype=np.uint64), np.zeros(200, np.int64))
    drawn = noise(keys, 40 * BLOCK).view(200, 40, BLOCK)
    assert torch.equal(drawn.amin(dim=2), block_minima(keys, 40, CPU))
    places = torch.bincount(drawn.argmin(dim=2).flatten(), minlength=BLOCK) / 8000
    assert (places - 1 / BLOCK).abs().max() < 5 * np.sqrt(1 / BLOCK / 8000)


def test_noise_of_a_token_does_not_depend_on_the_other_tokens() -> None:
    keys = noise_keys(np.arange(5, dtype=np.uint64), np.zeros(5, np.int64))
    some = torch.tensor([999, 3, 64, 63, 500]).expand(5, -1)
    assert torch.equal(exponential_noise(keys, some), noise(keys, 1000).gather(1, some))


@pytest.mark.parametrize("vocabulary", [1, 31, 2000, 70_001])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_gumbel_max_by_blocks_equals_gumbel_max_over_the_vocabulary(vocabulary: int, spread: float) -> None:
    logits = torch.randn(20, vocabulary, generator=torch.Generator().manual_seed(7)) * spread
    rules = rules_of(range(20), temperature=1.3)
    scaled = (logits - logits.amax(-1, keepdim=True)) / np.float32(1.3)
    expected = (scaled - noise(rules.keys, vocabulary).log()).argmax(-1)
    assert torch.equal(sample(logits, rules), expected)


@pytest.mark.parametrize("spread", [0.02, 1.0, 6.0])
def test_every_token_is_the_gumbel_max_of_the_reported_log_probs(spread: float) -> None:
    logits = torch.randn(40, 9000, generator=torch.Generator().manual_seed(9)).round(decimals=2) * spread
    rules = rules_of(
        range(40),
        top_k=np.tile([0, 0, 3, 300, 4000], 8),
        top_p=np.repeat([0.0, 0.2, 0.9, 0.999], 10),
        min_p=np.tile([0.0, 0.0, 0.001, 0.3], 10),
    )
    scores = processed_log_probs(logits, rules).double() - noise(rules.keys, 9000).double().log()
    assert torch.equal(sample(logits, rules), scores.argmax(-1))


def test_noise_of_adjacent_seeds_positions_and_tokens_is_uncorrelated() -> None:
    seeds = np.repeat(np.arange(30, dtype=np.uint64), 30)
    positions = np.tile(np.arange(30, dtype=np.int64), 30)
    cube = noise(noise_keys(seeds, positions), 100).reshape(30, 30, 100).numpy()
    for axis in range(3):
        first, second = np.delete(cube, -1, axis), np.delete(cube, 0, axis)
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.02


def test_noise_depends_on_seed_and_position_alone_up_to_the_largest_seed() -> None:
    seeds, positions = np.array([3, 2**64 - 1], np.uint64), np.array([2**40, 7], np.int64)
    together = noise(noise_keys(seeds, positions), 10)
    alone = noise(noise_keys(seeds[1:], positions[1:]), 10)
    assert torch.equal(together[1:], alone)


def test_log_probs_are_the_log_softmax_of_the_logits() -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    found = LogProbs.from_arrays(*log_probs(logits.log_softmax(-1), torch.tensor([3, 0]), top_n=2))
    expected = logits.log_softmax(-1)
    assert found.chosen == pytest.approx([expected[0, 3].item(), expected[1, 0].item()])
    assert found.top_ids == [[1, 5], [5, 1]]
    assert found.top_values[0] == pytest.approx([expected[0, 1].item(), expected[0, 5].item()])


@pytest.mark.parametrize("spread", [0.001, 3.0, 200.0])
def test_a_large_top_k_keeps_k_tokens_and_those_equal_to_the_last(spread: float) -> None:
    wanted = np.array([511, 512, 513, 2000, 7999, 8000, 9000, 600], np.int32)
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(len(wanted), 8000, generator=generator) * spread
    logits[0, :100] = -torch.inf
    # Of the last row, the 599th to the 604th most likely tokens are equal.
    order = logits[-1].argsort(descending=True)
    logits[-1, order[598:604]] = logits[-1, order[598]].clone()
    found = processed_log_probs(logits, rules_of(np.arange(len(wanted)), top_k=wanted))
    expected = torch.stack(
        [
            torch.where(row >= row.topk(min(k, 8000)).values[-1], row, -torch.inf).log_softmax(-1)
            for row, k in zip(logits, wanted.tolist(), strict=True)
        ]
    )
    assert (found.isfinite() == expected.isfinite()).all()
    assert torch.allclose(found, expected, atol=1e-4)
    assert found[-1].isfinite().sum() == 604
