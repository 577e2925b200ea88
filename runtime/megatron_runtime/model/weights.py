"""Copies a checkpoint's tensors into a decoder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.formats.weight_source import StoredTensor, WeightSource

if TYPE_CHECKING:
    from megatron_runtime.model.placements import Placement
    from megatron_runtime.model.quantized.placement import CodedPlacement


@dataclass(frozen=True)
class LoadProgress:
    """Progress of reading the checkpoint's weights, in bytes as stored."""

    loaded_bytes: int
    total_bytes: int
    seconds: float
    """Since the start of reading."""

    @property
    def bytes_per_second(self) -> float:
        """The mean rate so far."""
        return self.loaded_bytes / max(self.seconds, 1e-9)


ProgressCallback = Callable[[LoadProgress], None]


def load_weights(
    source: WeightSource,
    placements: Mapping[str, Placement | CodedPlacement],
    on_progress: ProgressCallback | None = None,
    *,
    check_finite: bool = False,
) -> None:
    """Fill every placement, reporting after each chunk. The source was checked with `check_weights`.

    With ``check_finite``, raises CheckpointError with the first tensor that has NaN or infinity in its final dtype.
    """
    tensors = source.tensors
    total = sum(_part_bytes(tensors[name], place.elements) for name, place in placements.items())
    loaded, start = 0, time.monotonic()
    for name, placement in placements.items():
        stored, done = tensors[name], 0
        for elements in placement.fill(source, name):
            done += elements
            if on_progress is not None:
                progress = LoadProgress(loaded + _part_bytes(stored, done), total, time.monotonic() - start)
                on_progress(progress)
        loaded += _part_bytes(stored, done)
        if check_finite and (wrong := placement.count_not_finite()):
            raise CheckpointError(
                f"{source.location}: {wrong:,} of the {placement.numbers:,} numbers in tensor {name} are NaN or "
                f"infinite as {placement.type_name}. Fetch the checkpoint again, or choose another dtype"
            )


def _part_bytes(stored: StoredTensor, elements: int) -> int:
    """Stored bytes of some elements of a tensor."""
    return stored.num_bytes * elements // max(math.prod(stored.shape), 1)
