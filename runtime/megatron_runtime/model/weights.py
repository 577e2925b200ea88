"""Copies a checkpoint's tensors into a decoder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.formats.weight_source import StoredTensor, WeightSource

if TYPE_CHECKING:
    from megatron_runtime.model.placements import Placement
    from megatron_runtime.model.quantized.float8_placement import Float8Placement
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
Placements = Mapping[str, "Placement | CodedPlacement | Float8Placement"]


def load_weights(
    source: WeightSource,
    placements: Placements,
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
    for name, filled in _fill_all(source, placements):
        stored, placement, done = tensors[name], placements[name], 0
        for elements in filled:
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


def _fill_all(source: WeightSource, placements: Placements) -> Iterator[tuple[str, Iterable[int]]]:
    """The name of each placement, with an iterator that fills it and returns the number of elements of each chunk.

    Several threads fill several placements where that is worth it.
    """
    if not source.reads_in_threads:
        yield from ((name, each.fill(source, name)) for name, each in placements.items())
        return
    # Imported here, because the checks of a checkpoint do not need PyTorch.
    import torch

    is_inference = torch.is_inference_mode_enabled()  # It is that of a thread.

    def fill(name: str) -> list[int]:
        with torch.inference_mode(is_inference):
            return list(placements[name].fill(source, name))

    threads = ThreadPoolExecutor(torch.get_num_threads(), "weights")
    try:
        chunks = threads.map(fill, placements)
        yield from zip(placements, chunks, strict=True)
    finally:
        threads.shutdown(cancel_futures=True)


def _part_bytes(stored: StoredTensor, elements: int) -> int:
    """Stored bytes of some elements of a tensor."""
    return stored.num_bytes * elements // max(math.prod(stored.shape), 1)
