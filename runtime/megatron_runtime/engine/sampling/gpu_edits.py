"""The edits of a batch's logits in the form of the kernels for GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.engine.sampling.filters.grammar import GrammarMask
from megatron_runtime.engine.sampling.filters.protocol import LogitsEdit
from megatron_runtime.engine.sampling.filters.token_filter import Operation, TokenEdits
from megatron_runtime.engine.sampling.sampling_table import SamplingRules

_WORD = 32
_BYTES_OF_AN_EDIT = 12
_OPERATIONS = {
    Operation.ADD: "add",
    Operation.PENALIZE: "penalize",
    Operation.SUBTRACT: "subtract",
    Operation.EXCLUDE: "subtract",
}
"""The kernel's names."""


class GpuEdits:
    """A launch for each edit of some tokens, one for penalties, and one for the masks of all other edits.

    Args:
        rules: One per row of the logits.
        vocab_size: Columns of the logits.
    """

    def __init__(self, rules: SamplingRules, vocab_size: int) -> None:
        by_kernel = _Edits.of(rules.edits, vocab_size)
        self._penalties = rules.penalties
        self._operations = [_OPERATIONS[edit.kind.operation] for edit in by_kernel.values]
        self.arrays: dict[str, NDArray[Any]] = _mask_arrays(by_kernel, len(rules.keys), vocab_size)
        """What `apply_` needs on the device."""
        for index, edit in enumerate(by_kernel.values):
            self.arrays |= {f"places {index}": edit.places, f"values {index}": edit.values}
        if self._penalties is not None:
            self.arrays |= self._penalties.arrays()

    def apply_(self, logits: Tensor, there: Mapping[str, Tensor], sampled: Tensor | None = None) -> None:
        """Change the logits, float32 [S, vocab] and contiguous, in place.

        Args:
            logits: The logits.
            there: ``arrays`` on their device.
            sampled: int64, the tokens of the last pass, where penalties need them.
        """
        # Imported here, because Triton is not needed on other devices.
        from megatron_runtime.gpu import sampling

        def edit(indices: range) -> None:
            for index in indices:
                sampling.edit(logits, there[f"places {index}"], there[f"values {index}"], self._operations[index])

        biases = self._operations.count(_OPERATIONS[Operation.ADD])  # They come first.
        edit(range(biases))
        if self._penalties is not None:
            self._penalties.apply_(logits, there, sampled)
        edit(range(biases, len(self._operations)))
        if "masks" in self.arrays:
            sampling.exclude(logits, there["masked rows"], there["masks"])


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
