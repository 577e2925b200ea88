"""top_n_sigma equals a reference in numpy, alone and with other truncations, and does not depend on the batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron_runtime.engine.sampling.kept_tokens import ScaledLogits
from megatron_runtime.engine.sampling.sampler import processed_log_probs, sample
from megatron_runtime.engine.sampling.sampling_table import SamplingRules, SamplingTable
from megatron_runtime.engine.scheduling.sequence import Sequence
from megatron_runtime.sampling_params import SamplingParams

ROWS = 6


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def rules_of(vocabulary: int, params: list[SamplingParams]) -> SamplingRules:
    table = SamplingTable(len(params), vocabulary)
    for row, given in enumerate(params):
        table.write(row, given, 1)
    return table.rules([(Sequence(row, [0, 1], 1, max_length=99, row=row), 2) for row in range(len(params))])


def random_logits(vocabulary: int, spread: float = 1.0) -> torch.Tensor:
    logits = torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * spread + 3
    logits[1, 1:] -= 30.0  # an outlier, far above the others
    return logits


def kept_by_reference(row: NDArray[np.float64], params: SamplingParams) -> NDArray[np.bool_]:
    """The definitions of top_n_sigma, top_k, top_p and min_p in this order, in double precision."""
    kept = row >= row.max() - params.top_n_sigma * row[np.isfinite(row)].std() if params.top_n_sigma else row > -np.inf
    scaled = (row - row.max()) / params.temperature
    if params.top_k:
        kept &= scaled >= np.sort(scaled)[-params.top_k]
    if 0 < params.top_p < 1:
        order = np.argsort(-np.where(kept, scaled, -np.inf))
        probabilities = np.where(kept, np.exp(scaled), 0)[order] / np.exp(scaled)[kept].sum()
        last = order[np.searchsorted(probabilities.cumsum(), params.top_p)]
        kept &= scaled >= scaled[last]
    return kept & (scaled >= np.log(params.min_p)) if params.min_p else kept


@pytest.mark.parametrize("vocabulary", [2, 511, 512, 513, 6000, 50_001])
@pytest.mark.parametrize("n", [1e-6, 0.5, 1.0, 2.5, 40.0])
def test_kept_tokens_are_those_of_the_reference_at_any_temperature(vocabulary: int, n: float) -> None:
    logits = random_logits(vocabulary)
    expected = [kept_by_reference(row, SamplingParams(top_n_sigma=n)) for row in logits.double().numpy()]
    for temperature in (0.01, 0.7, 1.0, 100.0):
        params = SamplingParams(seed=0, temperature=temperature, top_n_sigma=n)
        found = processed_log_probs(logits, rules_of(vocabulary, [params] * ROWS))
        assert np.array_equal(found.numpy() > -np.inf, expected)
        scaled = torch.where(torch.from_numpy(np.stack(expected)), logits / temperature, -torch.inf)
        assert torch.allclose(found, scaled.log_softmax(-1), atol=1e-3)


@pytest.mark.parametrize(
    "others",
    [
        {"top_k": 5},
        {"top_k": 700},
        {"top_p": 0.4},
        {"top_p": 0.97},
        {"min_p": 0.3},
        {"top_k": 40, "top_p": 0.9},
        {"top_k": 900, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize("n", [0.4, 1.5, 3.0])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_other_truncations_apply_to_the_tokens_that_it_keeps(others: dict[str, float], n: float, spread: float) -> None:
    logits = random_logits(6000, spread)
    params = SamplingParams(seed=0, temperature=0.8, top_n_sigma=n, **others)
    found = processed_log_probs(logits, rules_of(6000, [params] * ROWS)).isfinite().numpy()
    for row, kept in zip(logits.double().numpy(), found, strict=True):
        expected = kept_by_reference(row, params)
        # A sum that equals top_p up to rounding may be on either side of it: one token more or fewer.
        assert np.count_nonzero(kept != expected) <= (1 if params.top_p else 0)


def test_sampled_tokens_are_kept_ones_with_the_reported_probabilities() -> None:
    count = 60_000
    params = [SamplingParams(seed=seed, temperature=1.5, top_n_sigma=1.2) for seed in range(count)]
    logits = torch.tensor([1.0, 3.0, -2.0, 2.5, 0.0, 2.9, -30.0, -torch.inf])
    tokens = sample(logits.expand(count, -1), rules_of(8, params))
    expected = processed_log_probs(logits[None], rules_of(8, params[:1]))[0].exp()
    assert (expected == 0).tolist() == [not kept for kept in kept_by_reference(logits.double().numpy(), params[0])]
    frequencies = torch.bincount(tokens, minlength=8) / count
    assert frequencies[expected == 0].sum() == 0
    assert torch.allclose(frequencies, expected, atol=0.01)


@pytest.mark.parametrize("others", [{}, {"top_p": 0.8}, {"top_k": 50}, {"min_p": 0.1}], ids=str)
@pytest.mark.usefixtures("two_threads")
def test_a_row_has_the_same_bits_in_any_batch(others: dict[str, float]) -> None:
    vocabulary = 50_001  # large enough for torch to divide the sum of a single row among threads
    logits = random_logits(vocabulary)
    several = [SamplingParams(seed=row, temperature=1.1, top_n_sigma=0.3 + row / 4, **others) for row in range(ROWS)]
    several[4] = SamplingParams(seed=4, top_p=0.5)
    several[5] = SamplingParams(seed=5, temperature=0)
    together = rules_of(vocabulary, several)
    tokens, values = sample(logits, together), processed_log_probs(logits, together)
    for row in range(4):
        alone = together.take(np.array([row]))
        assert sample(logits[row : row + 1], alone).item() == tokens[row]
        assert torch.equal(processed_log_probs(logits[row : row + 1], alone)[0], values[row])


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("vocabulary", [100, 50_001, 262_144])
def test_the_deviation_of_a_row_has_the_same_bits_in_any_batch(vocabulary: int) -> None:
    logits = random_logits(vocabulary)
    scaled = ScaledLogits(logits, torch.arange(ROWS), logits.amax(1, keepdim=True), torch.full((ROWS, 1), 0.7))
    together = scaled.standard_deviation()
    assert torch.allclose(together, logits.std(1, keepdim=True, correction=0) / 0.7)
    alone = [scaled.take(torch.tensor([row])).standard_deviation() for row in range(ROWS)]
    assert torch.equal(together, torch.cat(alone))


def test_excluded_tokens_do_not_count_in_the_deviation() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -torch.inf, -torch.inf]])
    # The deviation of 2, 1, 0 is 0.816; with the others it would be infinite.
    found = processed_log_probs(logits, rules_of(5, [SamplingParams(seed=0, top_n_sigma=1.3)]))
    assert found.isfinite().tolist() == [[True, True, False, False, False]]


@pytest.mark.parametrize("n", [1e-30, 1.0, 1e30, 1e300])
@pytest.mark.parametrize("temperature", [1e-38, 1.0, 1e30, 1e300])
def test_extreme_values_keep_the_most_likely_tokens(n: float, temperature: float) -> None:
    params = SamplingParams(seed=0, temperature=temperature, top_n_sigma=n)
    equal = processed_log_probs(torch.full((1, 3), 2.0), rules_of(3, [params]))
    assert torch.allclose(equal, torch.full((1, 3), 1 / 3).log())
    logits = torch.tensor([[0.0, 1000.0, -1000.0, -torch.inf]])
    token = sample(logits, rules_of(4, [params])).item()
    assert token == 1 if n < 1 or temperature < 1 else token in (0, 1, 2)
