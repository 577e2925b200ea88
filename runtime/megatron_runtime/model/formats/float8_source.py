"""The interface of readers of checkpoints with matrices in fp8."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from megatron_runtime.model.formats.weight_source import WeightSource

if TYPE_CHECKING:  # The preflight reads headers without torch.
    from megatron_runtime.model.formats.quantization.stored_matrix import QuantizedPart


@runtime_checkable
class Float8Source(WeightSource, Protocol):
    """A source with matrices in fp8, whose numbers can be read."""

    def read_parts(self, name: str, rows: range, columns: range) -> Iterable[QuantizedPart]:
        """Consecutive pieces of some rows of a tensor that has a `Float8Coding`."""
