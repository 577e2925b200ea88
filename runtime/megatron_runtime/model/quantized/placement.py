"""The destination of a stored tensor in a matrix that stays quantized."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_runtime.model.formats.weight_source import CodedSource, WeightSource
from megatron_runtime.model.quantized.matrix import QuantizedMatrix


@dataclass(frozen=True)
class CodedPlacement:
    """Some rows of ``matrix``, from the row ``start`` on: the ``stored`` chunks of the tensor's rows, in order, and of
    each the ``columns``.
    """

    matrix: QuantizedMatrix
    start: int
    stored: tuple[range, ...]
    columns: slice

    @property
    def elements(self) -> int:
        """Number of weights."""
        return len(self._rows) * self.matrix.columns

    @property
    def numbers(self) -> int:
        """Number of values that `count_not_finite` checks: scales and mins."""
        return len(self._rows) * self.matrix.scales_per_row

    @property
    def type_name(self) -> str:
        """The type of the scales in memory, for errors."""
        return "float16"

    def fill(self, source: WeightSource, name: str) -> Iterator[int]:
        """Copy the tensor; yields the number of weights of each chunk."""
        assert isinstance(source, CodedSource)
        start = self.start
        for chunk in self.stored:
            for rows in source.read_coded(name, chunk, self.columns):
                self.matrix.fill(start, rows)
                start += len(rows)
                yield rows.elements

    def count_not_finite(self) -> int:
        """The number of scales and mins that are NaN or infinite."""
        return self.matrix.count_not_finite(self._rows)

    @property
    def _rows(self) -> range:
        """The rows of the matrix."""
        return range(self.start, self.start + sum(map(len, self.stored)))
