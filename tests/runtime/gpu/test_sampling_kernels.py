"""Sampling on the device in Triton's interpreter, against the sampler of the host: the same noise, the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_support.pretended import Work, pretended_device
from gpu_support.sampling_cases import edits_of, logits_that_are_not_finite, random_logits, rules_for, values

from megatron_runtime.engine.sampling import exponential_noise, gpu_edits
from megatron_runtime.engine.sampling.filters import TRUNCATIONS
from megatron_runtime.engine.sampling.filters.grammar import GrammarMask
from megatron_runtime.engine.sampling.filters.token_filter import Operation
from megatron_runtime.engine.sampling.filters.truncations import MinP, TopK, TopNSigma, TopP
from megatron_runtime.engine.sampling.gpu_sampler import TRUNCATION_FIELDS, GpuSampler
from megatron_runtime.engine.sampling.sampler import NO_TOKEN, processed_log_probs, sample
from megatron_runtime.engine.sampling.sampling_table import SamplingRules
from megatron_runtime.gpu import sampling, truncation

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CPU = torch.device("cpu")
VOCABULARY = sampling.PART + 17


def on_kernels(logits: torch.Tensor, rules: SamplingRules) -> list[int]:
    """The tokens of the kernels."""
    return GpuSampler(rules, logits.shape[1], CPU).sample(logits).tolist()


@pytest.mark.parametrize("vocabulary", [50, sampling.PART, VOCABULARY])
def test_the_sampled_tokens_are_those_of_the_host(vocabulary: int) -> None:
    logits = random_logits(9, vocabulary)
    rules = SamplingRules(np.linspace(0, 2, 9, dtype=np.float32), rules_for(9).keys)
    assert on_kernels(logits, rules) == sample(logits, rules).tolist()


def test_the_noise_has_the_constants_of_the_host() -> None:
    assert (sampling.NOISE_BLOCK, sampling.NOISE_STREAM) == (exponential_noise.BLOCK, exponential_noise.STREAM)


TRUNCATED: dict[str, Any] = {
    "top-k": [TopK.of(np.array([3, 40, 0, 10**9, 1], np.int32))],
    "top-p": [TopP.of(values(0.5, 0.9, 1, 0, 1e-6))],
    "min-p": [MinP.of(values(0.3, 0.01, 1, 0, 1e-6))],
    "top-n-sigma": [TopNSigma.of(values(1, 0.5, 0, 3e38, 1e-6))],
    "all": [
        TopNSigma.of(values(2, 2, 0, 1.5, 0)),
        TopK.of(np.array([30, 5, 10, 0, 7], np.int32)),
        TopP.of(values(0.8, 0.9, 0.7, 0.6, 1)),
        MinP.of(values(0.1, 0, 0.2, 0.05, 0.01)),
    ],
}


@pytest.mark.parametrize("truncations", TRUNCATED.values(), ids=TRUNCATED)
@pytest.mark.parametrize("temperature", [0.7, 30.0])
def test_truncations_keep_the_tokens_that_the_host_keeps(truncations: Any, temperature: float) -> None:
    """Also where several tokens equal the threshold, and where excluded ones are among those that a top-k counts."""
    logits = random_logits(5, 1500)
    logits[:, 5] = logits[:, 1100] = logits[:, 7]
    logits[3, ::2] = -torch.inf
    rules = rules_for(5, temperature, truncations=tuple(truncations))
    expected = processed_log_probs(logits.clone(), rules)
    sampler = GpuSampler(rules, logits.shape[1], CPU)
    found = sampler.processed_log_probs(logits.clone())
    assert torch.equal(found.isneginf(), expected.isneginf())
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert sampler.sample(logits).tolist() == sample(logits, rules).tolist()


LONG = 2 * truncation.PART + 77
CROWDED = {
    "tokens of one part": torch.arange(LONG) % (3 * truncation.VOCABULARY_BLOCK) < truncation.VOCABULARY_BLOCK,
    "tokens of few blocks": torch.arange(LONG) < 9 * truncation.VOCABULARY_BLOCK,
    "few tokens": torch.arange(LONG) % 1500 == 7,
    "all tokens": torch.ones(LONG, dtype=torch.bool),
}
"""The likely tokens of a vocabulary of three parts."""


@pytest.mark.parametrize("likely", CROWDED.values(), ids=CROWDED)
@pytest.mark.parametrize("less", [9.0, float("inf")])
def test_truncations_do_not_depend_on_the_list_of_candidates(likely: torch.Tensor, less: float) -> None:
    """Also where it has no room for the candidates of a part, or fewer of them than are kept."""
    logits = random_logits(6, LONG) / 3 - torch.where(likely, 0.0, less)
    truncations = (
        TopNSigma.of(values(0, 0, 0, 3, 1, 0)),
        TopK.of(np.array([700, 3, 0, 0, 500, LONG - 1], np.int32)),
        TopP.of(values(1, 0.8, 0.99, 0.6, 0.4, 0.5)),
    )
    rules = rules_for(6, 0.8, truncations=truncations)
    expected = processed_log_probs(logits.clone(), rules).isneginf()
    found = GpuSampler(rules, LONG, CPU).processed_log_probs(logits.clone()).isneginf()
    # The sum of a top-p is rounded differently: at most one token at its edge differs.
    assert ((found != expected).sum(1) <= torch.tensor([0, 0, 1, 1, 1, 1])).all()


@pytest.mark.parametrize("vocabulary", [70, VOCABULARY])
def test_edits_give_the_logits_of_the_host(vocabulary: int) -> None:
    logits = random_logits(2, vocabulary)
    rules = rules_for(2, edits=edits_of(vocabulary))
    expected = logits.clone()
    rules.edit_(expected)
    GpuSampler(rules, vocabulary, CPU).edit_(logits)
    assert torch.equal(logits, expected)


def test_rows_that_are_not_finite_have_no_token() -> None:
    logits = logits_that_are_not_finite(VOCABULARY)
    rules = rules_for(6, truncations=(TopP.of(values(*[0.9] * 6)), MinP.of(values(*[0.1] * 6))))
    found = on_kernels(logits, rules)
    assert found[:4] == [NO_TOKEN] * 4
    assert found == sample(logits, rules).tolist()
    assert on_kernels(logits, rules_for(6, 0.0)) == sample(logits, rules_for(6, 0.0)).tolist()


def test_an_excluded_nan_is_still_found() -> None:
    logits = torch.zeros(1, 40)
    logits[0, 33] = torch.nan
    mask = GrammarMask(np.array([0]), np.arange(40)[None] == 2)
    sampler = GpuSampler(rules_for(1, edits=(mask,)), 40, CPU)
    sampler.edit_(logits)
    assert sampler.sample(logits).tolist() == [NO_TOKEN]


def test_the_bits_of_a_row_do_not_depend_on_the_others() -> None:
    logits = random_logits(4, 1500)
    truncations = TopNSigma.of(values(2, 1, 0, 2)), TopP.of(values(0.9, 0.5, 0.3, 1))
    rules = rules_for(4, 0.9, truncations=truncations)
    whole = GpuSampler(rules, 1500, CPU).processed_log_probs(logits)
    for row in range(4):
        alone = rules.take(np.array([row]))
        assert torch.equal(GpuSampler(alone, 1500, CPU).processed_log_probs(logits[row : row + 1])[0], whole[row])


def test_every_filter_has_a_form_for_gpus() -> None:
    assert tuple(TRUNCATION_FIELDS) == TRUNCATIONS
    assert set(gpu_edits._OPERATIONS) == set(Operation)
    assert set(gpu_edits._OPERATIONS.values()) == set(sampling.OPERATIONS)


def test_sampling_with_everything_is_twelve_launches_and_one_pinned_copy(device_guard: Path) -> None:
    del device_guard
    rules = rules_for(2, edits=edits_of(70), truncations=(TopK.of(np.array([3, 0], np.int32)), MinP.of(values(0, 0.1))))
    logits = random_logits(2, 70)
    expected = logits.clone()
    rules.edit_(expected)
    with pretended_device() as device:
        there = logits.to("cuda")
        device.work = Work()
        sampler = GpuSampler(rules, 70, there.device)
        sampler.edit_(there)
        tokens = sampler.sample(there)
        assert (device.work.launches, device.work.pinned_copies) == (12, 1)
        assert (+device.work.waits, +device.work.copies) == ({}, {})
        assert tokens.cpu().tolist() == sample(expected, rules).tolist()
