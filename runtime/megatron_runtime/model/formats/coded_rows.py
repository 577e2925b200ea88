"""Rows of quantized matrices, in the blocks of ggml's types.

The layouts are those of ggml's ``ggml-common.h`` and of the gguf package's ``quants.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

BLOCK = 32
"""Columns of a block. Ranks may divide the columns of a matrix between blocks."""
QUAD = 4
"""Columns whose codes are in one word."""


@dataclass(frozen=True)
class Coding:
    """A weight is ``scale * (code - offset) + min``, with one scale for ``group`` columns and one min for a block."""

    bits: int
    group: int = BLOCK
    offset: int = 0
    has_mins: bool = False

    def num_bytes(self, elements: int) -> int:
        """Bytes of as many weights, of whole blocks: of their codes, scales and mins."""
        return elements * self.bits // 8 + 2 * elements // self.group + 2 * elements // BLOCK * self.has_mins


CODINGS: dict[str, Coding] = {
    "Q4_0": Coding(4, offset=8),
    "Q4_1": Coding(4, has_mins=True),
    "Q5_0": Coding(5, offset=16),
    "Q5_1": Coding(5, has_mins=True),
    "Q8_0": Coding(8, offset=128),
    "Q4_K": Coding(4, has_mins=True),
    "Q5_K": Coding(5, has_mins=True),
    "Q6_K": Coding(6, group=16, offset=32),
}
"""By the names of ggml's types. Matrices of other types can't stay quantized."""


@dataclass(frozen=True)
class CodedRows:
    """Some columns of consecutive rows of a matrix, as a file stores them."""

    kind: str
    """The name of ggml's type; one of `CODINGS`."""
    stored: NDArray[np.uint8]
    """Stored rows, uint8 [any, bytes of a row], contiguous."""
    rows: NDArray[np.int64]
    """int64 [rows]: which of the stored rows is each row."""
    blocks: NDArray[np.int64]
    """int64 [columns / BLOCK]: which of the blocks of a stored row is each block of columns."""

    @classmethod
    def of(
        cls,
        kind: str,
        stored: NDArray[np.uint8],
        columns: slice | None = None,
        *,
        rows: NDArray[np.int64] | None = None,
        column_groups: Sequence[int] = (),
    ) -> CodedRows:
        """Some or all of the ``columns`` and ``rows``.

        Args:
            kind: The name of ggml's type.
            stored: uint8 [any, bytes of a row], contiguous.
            columns: Whole blocks.
            rows: The places of the rows among the stored ones.
            column_groups: The place of each of so many equal groups of columns in stored rows, each of whole blocks;
                ``columns`` counts in the order of these groups. Empty where the order is the same.
        """
        elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        blocks = np.arange(stored.shape[1] // size * elements // BLOCK)
        if column_groups:
            blocks = blocks.reshape(len(column_groups), -1)[list(column_groups)].reshape(-1)
        if columns is not None:
            blocks = blocks[columns.start // BLOCK : columns.stop // BLOCK]
        return cls(kind, stored, np.arange(len(stored)) if rows is None else rows, np.ascontiguousarray(blocks))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    @property
    def elements(self) -> int:
        """Number of weights."""
        return len(self.rows) * len(self.blocks) * BLOCK
