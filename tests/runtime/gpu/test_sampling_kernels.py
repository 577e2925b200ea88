"""Sampling on the device in Triton's interpreter, against the search on the host: the same noise, the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_runtime.engine.sampling import exponential_noise, gumbel_max
from megatron_runtime.engine.sampling.exponential_noise import noise_keys
from megatron_runtime.gpu import sampling


def sampled(logits: torch.Tensor, count: int, **options: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of the kernels, and those of the host."""
    keys = noise_keys(np.arange(count, dtype=np.uint64) + 100, np.full(count, 7))
    expected = gumbel_max.gumbel_max(logits, keys, **options)
    low, high = exponential_noise.key_halves(keys)
    race = sampling.Race(
        rows=options.get("rows", torch.arange(count)),
        top=options.get("top", torch.zeros(count)),
        temperature=options.get("temperature", torch.ones(count)),
        least=options.get("least", torch.full((count,), -torch.inf)),
        low=low,
        high=high,
    )
    return sampling.gumbel_max(logits, race, block=exponential_noise.BLOCK, stream=exponential_noise.STREAM), expected


@pytest.mark.parametrize("vocabulary", [50, sampling.PART, 2 * sampling.PART + 17])
def test_the_sampled_tokens_are_those_of_the_host(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(24, vocabulary, generator=generator) * 3
    found, expected = sampled(logits, 24, temperature=torch.linspace(0.2, 2.0, 24))
    assert torch.equal(found, expected)


def test_excluded_tokens_and_rows_that_are_not_sampled_have_no_part() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 300, generator=generator) * 2
    logits[3, ::2] = -torch.inf
    rows = torch.tensor([3, 0, 5])
    top = logits[rows].amax(1)
    least = torch.tensor([-2.0, 0.0, -torch.inf])
    found, expected = sampled(logits, 3, rows=rows, top=top, temperature=torch.full((3,), 0.7), least=least)
    assert torch.equal(found, expected)
    assert found[0] % 2 == 1
    assert found[1] == logits[0].argmax()
