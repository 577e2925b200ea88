"""The interface of readers of all formats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from megatron_runtime.errors import CheckpointError

if TYPE_CHECKING:  # The preflight reads headers without torch.
    from torch import Tensor

    from megatron_runtime.model.formats.coded_rows import CodedRows, Coding

CHUNK_ELEMENTS = 4 * 1024 * 1024
"""Number of elements of a chunk, so that loading needs little memory beyond the weights."""

SMALLEST_GROUP = 32
"""The columns of a matrix in fp8 that have one scale are a multiple of this, or all."""

_NAMED_IN_ERRORS = 5


@dataclass(frozen=True)
class Float8Coding:
    """That of a matrix of 8-bit floating-point numbers."""

    type_name: str
    """Of torch."""
    columns: int
    """Consecutive columns that have the same scale; at least all of them: whole rows."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a checkpoint stores it; ``shape`` is the logical one, rows first."""

    shape: tuple[int, ...]
    num_bytes: int
    kind: str
    """The name of the type in the checkpoint, such as ``BF16`` or ``Q4_1``."""
    coding: Coding | None = None
    """That of a quantized matrix that can stay so in memory."""
    float8: Float8Coding | None = None
    """That of a matrix in fp8."""


class WeightSource(Protocol):
    """A checkpoint's tensors under Hugging Face's names.

    Attributes:
        reads_in_threads: Whether it is worth it to read several tensors at the same time, because one thread computes
            for a large part of the time.
    """

    reads_in_threads: bool

    @property
    def location(self) -> str:
        """The file or folder, for errors."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors, without known unused ones."""

    def read(self, name: str, into: Tensor, start: Sequence[int]) -> Iterable[int]:
        """Copy the part of the tensor that begins at ``start`` and has the shape of ``into``, converting its type.

        Reads little more than that part; yields the number of elements of each chunk after it is copied.
        """


@runtime_checkable
class CodedSource(WeightSource, Protocol):
    """A source with quantized matrices, whose codes can be read."""

    def read_coded(self, name: str, rows: range, columns: slice) -> Iterable[CodedRows]:
        """Consecutive chunks of rows of a tensor that has a `Coding`; the columns are whole blocks."""


def float8_group(codings: Sequence[Float8Coding | None], columns: range, width: int) -> int | None:
    """The columns that have one scale in memory, of a part of the columns of matrices that are one behind the other.

    Args:
        codings: Of all of these matrices.
        columns: Those of a rank.
        width: All columns.

    Returns:
        None if the matrices can't stay in fp8: their types differ, or too few columns have one scale.
    """
    found = [coding for coding in codings if coding is not None]
    if len(found) < len(codings) or len({coding.type_name for coding in found}) != 1:
        return None
    parts = [coding.columns for coding in found if coding.columns < width]
    if not parts:
        return len(columns)
    # Both ends, so that two ranks that divide the columns between them decide alike.
    group = math.gcd(columns.start, columns.stop % width, *parts)
    return group if group % SMALLEST_GROUP == 0 else None


def check_weights(source: WeightSource, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError when tensors are missing, left over or of another shape than in the configuration.

    ``expected`` are the shapes of a whole model's tensors.
    """
    stored = source.tensors
    if missing := [name for name in expected if name not in stored]:
        raise CheckpointError(
            f"{source.location}: {_some(missing)} missing, expected by the configuration. "
            "Fetch the whole checkpoint again, or correct its configuration"
        )
    if extra := [name for name in stored if name not in expected]:
        raise CheckpointError(
            f"{source.location}: {_some(extra)} found that the configuration does not have. "
            "The configuration belongs to another checkpoint"
        )
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise CheckpointError(
                f"{source.location}: tensor {name} has shape {list(stored[name].shape)}, but the configuration "
                f"expects {list(shape)}. The configuration belongs to another checkpoint"
            )


def row_pieces(shape: tuple[int, ...]) -> list[slice]:
    """Row ranges of a tensor, each with about CHUNK_ELEMENTS elements and at least one row."""
    row_elements = 1
    for size in shape[1:]:
        row_elements *= size
    step = max(1, CHUNK_ELEMENTS // row_elements)
    return [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def _some(names: list[str]) -> str:
    listed = ", ".join(names[:_NAMED_IN_ERRORS])
    noun = "tensor" if len(names) == 1 else f"{len(names)} tensors:"
    return f"{noun} {listed}" + (" and others" if len(names) > _NAMED_IN_ERRORS else "")
