"""Samples on a GPU, with the kernels of this project: one copy of the parameters, and nothing that waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.engine.packed_arrays import on_device
from megatron_runtime.engine.sampling.exponential_noise import key_halves
from megatron_runtime.engine.sampling.filters.grammar import GrammarMask
from megatron_runtime.engine.sampling.filters.protocol import LogitsEdit
from megatron_runtime.engine.sampling.filters.token_filter import Operation, TokenEdits
from megatron_runtime.engine.sampling.filters.truncations import MinP, TopK, TopNSigma, TopP, Truncation
from megatron_runtime.engine.sampling.sampling_table import SamplingRules
from megatron_runtime.model.kernels.triton_support import has_triton

_WORD = 32
_BYTES_OF_AN_EDIT = 12
_OPERATIONS = {
    Operation.ADD: "add",
    Operation.PENALIZE: "penalize",
    Operation.SUBTRACT: "subtract",
    Operation.EXCLUDE: "subtract",
}
"""The kernel's names."""
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
        from megatron_runtime.gpu import sampling

        self._kernels = sampling
        edits = _Edits.of(rules.edits, vocab_size)
        self._operations = [_OPERATIONS[edit.kind.operation] for edit in edits.values]
        arrays = _row_arrays(rules)
        for index, edit in enumerate(edits.values):
            arrays |= {f"places {index}": edit.places, f"values {index}": edit.values}
        arrays |= _mask_arrays(edits, len(rules.keys), vocab_size)
        self._arrays = there = on_device(arrays, device) if arrays else {}
        self._rows: sampling.SampledRows | None = None
        """None if all rows are greedy."""
        if "temperature" in there:
            truncations = None
            if "top_k" in there:
                truncations = sampling.Truncations(**{name: there[name] for name in TRUNCATION_FIELDS.values()})
            self._rows = sampling.SampledRows(there["temperature"], there["low"], there["high"], truncations)

    def edit_(self, logits: Tensor) -> None:
        """Apply the edits to the logits, float32 [S, vocab] and contiguous, in place: a launch for each edit of some
        tokens, and one for the masks of all others."""
        for index, operation in enumerate(self._operations):
            places, values = self._arrays[f"places {index}"], self._arrays[f"values {index}"]
            self._kernels.edit(logits, places, values, operation)
        if "masks" in self._arrays:
            self._kernels.exclude(logits, self._arrays["masked rows"], self._arrays["masks"])

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
            least = self._kernels.least_kept(logits, top, temperature, self._rows.truncations)
            scaled = torch.where(scaled < least[:, None], -torch.inf, scaled)
        return torch.where(is_scaled, scaled, logits).log_softmax(dim=-1)


def _row_arrays(rules: SamplingRules) -> dict[str, NDArray[Any]]:
    """The parameters of the rows, unless all are greedy; those of truncations only if any row uses one."""
    is_stochastic = rules.is_stochastic
    if not is_stochastic.any():
        return {}
    low, high = key_halves(rules.keys)
    arrays: dict[str, NDArray[Any]] = {
        "temperature": np.where(is_stochastic, rules.temperature, np.float32(0)),
        "low": low.numpy(),
        "high": high.numpy(),
    }
    if (rules.is_truncated & is_stochastic).any():
        arrays |= {name: np.zeros(len(rules.keys), kind.dtype) for kind, name in TRUNCATION_FIELDS.items()}
        arrays |= {TRUNCATION_FIELDS[type(truncation)]: truncation.values for truncation in rules.truncations}
    return arrays


@dataclass(frozen=True)
class _Edits:
    """The edits of a batch by the kernel that applies them."""

    values: list[TokenEdits]
    """Changes of some tokens."""
    exclusions: list[TokenEdits]
    """Exclusions of so many tokens that they become masks."""
    grammars: list[GrammarMask]

    @classmethod
    def of(cls, edits: tuple[LogitsEdit, ...], vocab_size: int) -> _Edits:
        sorted_ = cls([], [], [])
        for edit in edits:
            if isinstance(edit, GrammarMask):
                sorted_.grammars.append(edit)
            elif isinstance(edit, TokenEdits):
                (sorted_.exclusions if _needs_mask(edit, vocab_size) else sorted_.values).append(edit)
            else:
                name = type(edit).__name__
                raise TypeError(f"the edit {name} has no form for GPUs: GpuSampler knows TokenEdits and GrammarMask")
        return sorted_


def _needs_mask(edit: TokenEdits, vocab_size: int) -> bool:
    """Whether it excludes so many tokens that masks have fewer bytes than their places and values."""
    if edit.kind.operation is not Operation.EXCLUDE:
        return False
    rows = 1 + np.count_nonzero(np.diff(edit.places // vocab_size))
    return bool(len(edit.places) * _BYTES_OF_AN_EDIT > rows * vocab_size // 8)


def _mask_arrays(edits: _Edits, count: int, vocab_size: int) -> dict[str, NDArray[Any]]:
    """Bit masks of the excluded tokens, for the rows that have any. An exclusion commutes with every other edit."""
    if not edits.grammars and not edits.exclusions:
        return {}
    is_masked = np.zeros(count, np.bool_)
    for excluded in (
        *(mask.rows for mask in edits.grammars),
        *(edit.places // vocab_size for edit in edits.exclusions),
    ):
        is_masked[excluded] = True
    rows = np.flatnonzero(is_masked)
    place = is_masked.cumsum() - 1
    words = -(-vocab_size // _WORD)
    masks = np.zeros((len(rows), words), np.uint32)
    for mask in edits.grammars:
        masks[place[mask.rows]] |= _excluded_bits(mask.allowed, words)
    for edit in edits.exclusions:
        row, token = np.divmod(edit.places, vocab_size)
        own = np.zeros_like(masks)
        # The tokens of a row are distinct, so that adding their bits is the same as combining them.
        np.add.at(own, (place[row], token // _WORD), np.uint32(1) << (token % _WORD).astype(np.uint32))
        masks |= own
    return {"masked rows": rows.astype(np.int64), "masks": masks.view(np.int32)}


def _excluded_bits(allowed: NDArray[np.bool_], words: int) -> NDArray[np.uint32]:
    """bool [G, vocab] as bits of what is not allowed: uint32 [G, words], the first in the lowest bit of a word."""
    packed = np.zeros((len(allowed), words * _WORD // 8), np.uint8)
    packed[:, : -(-allowed.shape[1] // 8)] = np.packbits(allowed, axis=1, bitorder="little")
    return ~packed.view("<u4")
