"""The interface of all layouts of quantized matrices in safetensors files, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.formats.weight_source import StoredTensor, WeightSource

if TYPE_CHECKING:  # The preflight reads headers without torch.
    import torch
    from torch import Tensor

    from megatron_runtime.model.formats.coded_rows import Coding

Shape = tuple[int, ...]
CONFIG = "quantization_config"
"""The field of a ``config.json``."""
REMEDY = "Choose a checkpoint of another kind, such as a GGUF file or one that isn't quantized"
SCALE_TYPES = ("F32", "BF16", "F16", "F64", "F8_E8M0")
"""Types of scales. The last one is a power of two."""


@dataclass(frozen=True)
class QuantizedPart:
    """Some rows and columns of a matrix: a weight is ``(code - zero) * scale``."""

    codes: Tensor
    """uint8 or float8 [rows, columns]."""
    scales: Tensor
    """float32 [rows, groups]."""
    zeros: Tensor | float
    """float32 [rows, groups], or one for all."""
    groups: Tensor
    """int64 [columns], the group of each."""

    def expand(self) -> Tensor:
        """The weights, float32 [rows, columns], each rounded once."""
        import torch  # Imported here, because reading the header does not need it.

        rows, columns = self.codes.shape
        groups, width = self.scales.shape[1], columns // self.scales.shape[1]
        # Broadcasting groups of one width takes a tenth of the time of looking up the group of each column.
        if columns == groups * width and torch.equal(self.groups, torch.arange(columns) // width):
            return self._weights((rows, groups, width), lambda numbers: numbers[..., None]).flatten(1)
        return self._weights((rows, columns), lambda numbers: numbers.index_select(1, self.groups))

    def _weights(self, shape: Shape, spread: Callable[[Tensor], Tensor]) -> Tensor:
        """Those with the scales and zeros that ``spread`` gives the shape of the codes."""
        values = _numbers(self.codes).view(shape)
        if not isinstance(self.zeros, float):
            values -= spread(self.zeros)
        elif self.zeros:
            values -= self.zeros
        values *= spread(self.scales)
        return values


def _numbers(codes: Tensor) -> Tensor:
    """As float32. Those of a float8 are looked up, which takes a fifth of the time of torch's conversion."""
    import torch

    if codes.dtype is torch.uint8:
        return codes.contiguous().float()
    table = torch.arange(256, dtype=torch.uint8).view(codes.dtype).float()
    return table.index_select(0, codes.contiguous().view(torch.uint8).int().flatten()).view(codes.shape)


class StoredMatrix(Protocol):
    """A quantized matrix [out, in], of one or more stored tensors."""

    @property
    def module(self) -> StoredModule:
        """Its tensors."""

    @property
    def shape(self) -> Shape:
        """Rows and columns."""

    @property
    def kind(self) -> str:
        """What it is stored as, for the log."""

    @property
    def coding(self) -> Coding | None:
        """Of a matrix that can stay quantized: that of the codes in its parts."""

    def part(self, rows: range, columns: range) -> QuantizedPart:
        """Read some of it. Raises CheckpointError if the stored numbers contradict each other."""


@dataclass(frozen=True)
class StoredModule:
    """The stored tensors of one module, which together are its quantized matrix."""

    source: WeightSource
    name: str
    tensors: Mapping[str, StoredTensor]
    """By the ends of their names, such as ``weight_scale``."""
    expected: Shape | None
    """The shape of the matrix in the configuration, if it has the matrix."""

    def tensor(self, ending: str) -> StoredTensor:
        """One of them. Raises CheckpointError if it is missing."""
        if (found := self.tensors.get(ending)) is None:
            raise CheckpointError(
                f"{self.source.location}: tensor {self.name}.{ending} missing, which a quantized matrix needs beside "
                f"{self.name}.{next(iter(self.tensors))}. Fetch the whole checkpoint again"
            )
        return found

    def matrix_shape(self, ending: str) -> tuple[int, int]:
        """That of a tensor. Raises CheckpointError if it is missing, or is not a matrix with one number or more."""
        shape = self.tensor(ending).shape
        if len(shape) != 2 or 0 in shape:
            raise self.refuse(ending, f"has shape {list(shape)}, but quantized matrices have two dimensions")
        return shape[0], shape[1]

    def check(self, ending: str, expected: Shape, by: str) -> None:
        """Raise CheckpointError if a tensor is missing, or hasn't the shape that follows from ``by``."""
        if (found := self.tensor(ending).shape) != expected:
            raise self.refuse(ending, f"has shape {list(found)}, but {by} requires {list(expected)}")

    def check_type(self, ending: str, types: tuple[str, ...]) -> None:
        """Raise CheckpointError if a tensor is missing, or its stored type is none of ``types``."""
        if (found := self.tensor(ending).kind) not in types:
            raise self.refuse(ending, f"has type {found}, expected one of {', '.join(types)}")

    def refuse(self, ending: str, reason: str) -> CheckpointError:
        """The error for a tensor that does not fit the configuration."""
        return CheckpointError(
            f"{self.source.location}: tensor {self.name}.{ending} {reason}. The configuration belongs to another "
            "checkpoint, or the checkpoint is damaged: fetch it again"
        )

    def read(self, ending: str, dtype: torch.dtype, *spans: range) -> Tensor:
        """A part of a tensor, with a span for each dimension."""
        import torch  # Imported here, because reading the header does not need it.

        into = torch.empty([len(span) for span in spans], dtype=dtype)
        for _ in self.source.read(f"{self.name}.{ending}", into, [span.start for span in spans]):
            pass
        return into


def blocks_of(span: range, size: int) -> tuple[range, Tensor]:
    """The blocks of ``size`` rows or columns that a span touches, and int64 [len(span)]: which of them each is in."""
    import torch  # Imported here, because reading the header does not need it.

    blocks = range(span.start // size, -(-span.stop // size))
    return blocks, torch.arange(span.start, span.stop) // size - blocks.start


def check_transposed(module: StoredModule, shape: Shape, words: int, group_size: int) -> int:
    """Check ``qzeros`` and ``scales`` of a transposed matrix [rows, columns], as GPTQ and AWQ store it.

    Args:
        module: Its tensors.
        shape: Rows and columns.
        words: The columns of ``qzeros``.
        group_size: Columns of a group; -1: all.

    Returns:
        Columns of a group.

    Raises:
        CheckpointError: A tensor is missing, or has another shape or type.
    """
    rows, columns = shape
    width = columns if group_size == -1 else group_size
    groups, by = -(-columns // width), f"{CONFIG}.group_size"
    module.check("scales", (groups, rows), by)
    module.check("qzeros", (groups, words), by)
    module.check_type("scales", SCALE_TYPES)
    for ending in ("qweight", "qzeros"):
        module.check_type(ending, ("I32",))
    return width


@dataclass(frozen=True)
class ScaleGrid:
    """Scales, or zero points, one for each block of a matrix [rows, columns]."""

    module: StoredModule
    ending: str
    block: tuple[int, int]
    """Rows and columns of a block."""

    @classmethod
    def of(
        cls,
        module: StoredModule,
        ending: str,
        shape: Shape,
        block: tuple[int, int] | None,
        by: str,
        types: tuple[str, ...] = SCALE_TYPES,
    ) -> ScaleGrid:
        """That of a matrix of ``shape``, in blocks of the size that the field ``by`` gives. Without one: one scale for
        all weights or for each row, as the stored shape says.

        Raises CheckpointError if the stored shape is another, or the stored type none of ``types``.
        """
        rows, columns = shape
        stored = module.tensor(ending).shape
        module.check_type(ending, types)
        if block is not None:
            module.check(ending, (-(-rows // block[0]), -(-columns // block[1])), by)
            return cls(module, ending, block)
        if stored in ((), (1,), (1, 1)):
            return cls(module, ending, (rows, columns))
        if stored in ((rows,), (rows, 1)):
            return cls(module, ending, (1, columns))
        raise module.refuse(
            ending, f"has shape {list(stored)}, expected one number for all weights, or one for each of {rows} rows"
        )

    def read(self, rows: range, columns: range) -> tuple[Tensor, Tensor]:
        """float32 [rows, groups] with the numbers of some rows, and int64 [columns] with the group of each column."""
        import torch

        (down, in_grid), (across, groups) = (blocks_of(*each) for each in zip((rows, columns), self.block, strict=True))
        spans = (down, across)[: len(self.module.tensor(self.ending).shape)]
        grid = self.module.read(self.ending, torch.float32, *spans).reshape(len(down), len(across))
        return grid[in_grid], groups
