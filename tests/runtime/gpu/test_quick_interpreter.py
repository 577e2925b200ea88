"""The quick parts of Triton's interpreter, against the interpreter as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from gpu_support.paged import PagedCase
from gpu_support.quick_interpreter import quick_interpreter
from torch import Tensor
from triton.runtime.errors import InterpreterError

from megatron_runtime.engine.sampling.exponential_noise import noise_keys
from megatron_runtime.engine.sampling.filters.truncations import TopK, TopP
from megatron_runtime.engine.sampling.gpu_sampler import GpuSampler
from megatron_runtime.engine.sampling.sampling_table import SamplingRules
from megatron_runtime.gpu import rows


@pytest.fixture(autouse=True)
def quick_interpretation() -> None:
    """Not for all of a test here."""


def attention() -> list[Tensor]:
    """Prompts and single tokens, with a window."""
    case = PagedCase.random(((40, 1), (33, 20), (5, 5)), (4, 2), 64, 16, torch.float16)
    return [case.attend(13, 5.0), *case.cache]


def sampling() -> list[Tensor]:
    """With noise, whose integers overflow, and a sort of the scores."""
    truncations = [TopK.of(np.array([30, 0], np.int32)), TopP.of(np.array([0.8, 0.5], np.float32))]
    keys = noise_keys(np.arange(2, dtype=np.uint64), np.full(2, 7))
    rules = SamplingRules(np.full(2, 0.9, np.float32), keys, truncations)
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    return [GpuSampler(rules, 50, torch.device("cpu")).sample(logits)]


def norms() -> list[Tensor]:
    """Of rows, whose types are narrower than the sums."""
    given = torch.randn(3, 80, generator=torch.Generator().manual_seed(5)).half()
    return [rows.normalize(given, given[0], given[1], 1e-5, kind) for kind in rows.NORMS]


@pytest.mark.parametrize("compute", [attention, sampling, norms])
def test_kernels_give_the_same_bits(compute: Callable[[], list[Tensor]]) -> None:
    expected = compute()
    with quick_interpreter():
        found = compute()
    assert all(torch.equal(*(each.view(torch.uint8) for each in pair)) for pair in zip(found, expected, strict=True))


@triton.jit
def read(values: Any, out: Any, size: tl.constexpr, wrong: tl.constexpr) -> None:
    """Values of unequal shapes, if ``wrong``."""
    place = tl.arange(0, size)
    tl.store(out + place, tl.load(values + place) + tl.max(tl.arange(0, 2 * size if wrong else size)[:, None], axis=1))


def test_the_functions_of_the_language_are_those_of_triton_again_after_a_kernel_and_after_an_error() -> None:
    def functions() -> list[Any]:
        return [tl.load, tl.arange, tl.range, tl.core.load, tl.tensor.__add__, tl.tensor.__init__, tl.dtype.to_ir]

    given, out, before = torch.arange(4), torch.empty(4, dtype=torch.int64), functions()
    with quick_interpreter():
        read[(1,)](given, out, 4, False)
        with pytest.raises(InterpreterError, match="incompatible dimensions"):
            read[(1,)](given, out, 4, True)
        read[(1,)](given, out, 4, False)
    assert out.tolist() == [0, 2, 4, 6]
    assert all(old is new for old, new in zip(before, functions(), strict=True))
