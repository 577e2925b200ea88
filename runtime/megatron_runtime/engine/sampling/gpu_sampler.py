"""Samples on a GPU, with the kernels of this project: one copy of the parameters, and nothing that waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.engine.packed_arrays import on_device
from megatron_runtime.engine.sampling.exponential_noise import key_halves
from megatron_runtime.engine.sampling.filters.truncations import MinP, TopK, TopNSigma, TopP, Truncation
from megatron_runtime.engine.sampling.gpu_edits import GpuEdits
from megatron_runtime.engine.sampling.sampling_table import SamplingRules
from megatron_runtime.model.kernels.triton_support import has_triton

TRUNCATION_FIELDS: dict[type[Truncation], str] = {
    TopNSigma: "top_n_sigma",
    TopK: "top_k",
    TopP: "top_p",
    MinP: "min_p",
}
"""The names of the kernel's parameters, in the order in which it applies them."""


def has_gpu_sampler(device: torch.device) -> bool:
    """Whether the kernels can be used."""
    return device.type == "cuda" and has_triton()


class GpuSampler:
    """The sampling rules of a batch on a GPU.

    Args:
        rules: One per row of the logits.
        vocab_size: Columns of the logits.
        device: That of the logits.
    """

    def __init__(self, rules: SamplingRules, vocab_size: int, device: torch.device) -> None:
        # Imported here, because Triton is not needed on other devices.
        from megatron_runtime.gpu import sampling, truncation

        self._kernels = sampling
        self._least_kept = truncation.least_kept
        self._edits = GpuEdits(rules, vocab_size)
        arrays = _row_arrays(rules) | self._edits.arrays
        self._arrays = there = on_device(arrays, device) if arrays else {}
        self._rows: sampling.SampledRows | None = None
        """None if all rows are greedy."""
        if "temperature" in there:
            truncations = None
            if "top_k" in there:
                truncations = truncation.Truncations(**{name: there[name] for name in TRUNCATION_FIELDS.values()})
            self._rows = sampling.SampledRows(there["temperature"], there["low"], there["high"], truncations)

    def edit_(self, logits: Tensor) -> None:
        """As in `sampler.Sampler`."""
        self._edits.apply_(logits, self._arrays)

    def sample(self, logits: Tensor) -> Tensor:
        """As `sampler.sample`."""
        return self._kernels.row_max(logits)[1] if self._rows is None else self._kernels.sample(logits, self._rows)

    def processed_log_probs(self, logits: Tensor) -> Tensor:
        """As `sampler.processed_log_probs`."""
        if self._rows is None:
            return logits.log_softmax(dim=-1)
        top, _ = self._kernels.row_max(logits)
        temperature = self._rows.temperature
        is_scaled = ((temperature > 0) & top.isfinite())[:, None]
        scaled = (logits - top[:, None]) / temperature[:, None]
        if self._rows.truncations is not None:
            least = self._least_kept(logits, top, temperature, self._rows.truncations)
            scaled = torch.where(scaled < least[:, None], -torch.inf, scaled)
        return torch.where(is_scaled, scaled, logits).log_softmax(dim=-1)


def row_parameters(rules: SamplingRules) -> dict[str, NDArray[Any]]:
    """The parameters of all rows, each [S]: fields of SampledRows and Truncations. Those of truncations that no row
    uses are missing; 0 disables each of them."""
    low, high = key_halves(rules.keys)
    arrays: dict[str, NDArray[Any]] = {
        "temperature": np.where(rules.is_stochastic, rules.temperature, np.float32(0)),
        "low": low.numpy(),
        "high": high.numpy(),
    }
    return arrays | {TRUNCATION_FIELDS[type(each)]: each.values for each in rules.truncations}


def _row_arrays(rules: SamplingRules) -> dict[str, NDArray[Any]]:
    """The same, unless all rows are greedy; with the parameters of all truncations if any row uses one."""
    if not rules.is_stochastic.any():
        return {}
    arrays = row_parameters(rules)
    if not (rules.is_truncated & rules.is_stochastic).any():
        return {name: values for name, values in arrays.items() if name not in TRUNCATION_FIELDS.values()}
    return {name: np.zeros(len(rules.keys), kind.dtype) for kind, name in TRUNCATION_FIELDS.items()} | arrays
