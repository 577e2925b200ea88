"""The destination of a stored tensor in a matrix that stays in fp8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.formats.float8_source import Float8Source
from megatron_runtime.model.formats.weight_source import WeightSource
from megatron_runtime.model.quantized.float8_linear import Float8Linear


@dataclass(frozen=True)
class Float8Placement:
    """Some rows of the matrix of ``linear``, from the row ``start`` on: the ``stored`` chunks of the tensor's rows, in
    order, and of each the ``columns``.
    """

    linear: Float8Linear
    start: int
    stored: tuple[range, ...]
    columns: range

    @property
    def elements(self) -> int:
        """Number of weights."""
        return sum(map(len, self.stored)) * len(self.columns)

    @property
    def numbers(self) -> int:
        """Number of values that `count_not_finite` checks: codes and scales."""
        return self.elements + self.linear.scales.shape[0] * len(self._rows)

    @property
    def type_name(self) -> str:
        """The type of the weights in memory, for errors."""
        return str(self.linear.kind).removeprefix("torch.")

    def fill(self, source: WeightSource, name: str) -> Iterator[int]:
        """Copy the tensor; yields the number of weights of each chunk.

        Raises:
            CheckpointError: Columns that should have one scale have several.
        """
        assert isinstance(source, Float8Source)
        start, width = self.start, self.linear.group
        for chunk in self.stored:
            for part in source.read_parts(name, chunk, self.columns):
                groups = part.groups[::width]
                if not groups.repeat_interleave(width)[: len(part.groups)].equal(part.groups):
                    raise CheckpointError(
                        f"{source.location}: tensor {name} has groups of columns that its configuration does not have. "
                        "Fetch the checkpoint again, or use --quantized-weights expand"
                    )
                self.linear.fill(start, part.codes, part.scales.index_select(1, groups))
                start += len(part.codes)
                yield part.codes.numel()

    def count_not_finite(self) -> int:
        """The number of codes and scales that are NaN or infinite."""
        return self.linear.count_not_finite(self._rows)

    @property
    def _rows(self) -> range:
        return range(self.start, self.start + sum(map(len, self.stored)))
