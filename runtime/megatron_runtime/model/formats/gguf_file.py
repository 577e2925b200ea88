"""GGUF files: the header (metadata and tensor table) and raw tensor data.

The format is specified in ggml's ``docs/gguf.md``. ``gguf.GGUFReader`` is not used for the header: it does not check
lengths, so that a damaged file could keep it busy without end, and a truncated one ends in an IndexError without a
message. Types and dequantization are those of the package.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.constants import GGUF_DEFAULT_ALIGNMENT
from gguf.quants import dequantize

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.formats.checkpoint_path import gguf_parts

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_FETCH_AGAIN = "Fetch the file again"
_ROW_ELEMENTS = 8192
"""Weights of a row from which the time of its calls does not matter. Sixteen such rows fit the second cache level."""
_LENGTH = struct.Struct("<Q")
"""Length of a string, before its bytes."""
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table. ``shape`` has the rows first; ``offset`` counts from the start of its file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    path: Path
    """Of the file."""

    @property
    def row_bytes(self) -> int:
        """Stored bytes of one row (the last dimension)."""
        elements, size = GGML_QUANT_SIZES[self.kind]
        return int(self.shape[-1] // elements * size)

    @property
    def num_rows(self) -> int:
        """Rows of the tensor seen as a matrix; a vector is one row."""
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows

    @property
    def num_bytes(self) -> int:
        """Stored bytes."""
        return self.row_bytes * self.num_rows


class GgufFile:
    """An opened GGUF file: ``metadata`` by key, ``tensors`` by name. Tensor data is read on request.

    If the file is a part of a divided one, all parts are opened, and ``path`` is the first. Raises CheckpointError if a
    part is missing, isn't GGUF, is damaged, or ends before the data that its header describes.
    """

    def __init__(self, path: Path) -> None:
        first, *others = parts = gguf_parts(path)
        self.path = first
        self.tensors: dict[str, GgufTensor] = {}
        self.metadata = self._read(first)
        count = self.metadata.get("split.count", 0)
        if isinstance(count, int) and count > 1 and count != len(parts):
            raise CheckpointError(
                f"{path}: is one of {count} parts, which are found by names that end in -00001-of-{count:05d}.gguf. "
                "Rename them, or merge them: llama-gguf-split --merge"
            )
        for part in others:
            self._read(part)

    def rows(self, tensor: GgufTensor, part: slice) -> npt.NDArray[np.float32]:
        """Dequantized rows of ``tensor`` seen as a matrix, float32 [rows, last dimension]."""
        try:
            values = _dequantized(self.stored_rows(tensor, part), tensor.kind)
        except NotImplementedError:
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name} has type {tensor.kind.name}, which can't be dequantized. "
                "Choose another quantization, such as Q8_0 or Q4_K_M"
            ) from None
        return np.require(values, np.float32, "W")

    def stored_rows(self, tensor: GgufTensor, part: slice) -> npt.NDArray[np.uint8]:
        """The bytes of the same rows, uint8 [rows, stored bytes of a row]."""
        first, last, _ = part.indices(tensor.num_rows)
        # Read instead of mapped, because pages of a mapped file count as memory in use.
        place, count = tensor.offset + first * tensor.row_bytes, (last - first) * tensor.row_bytes
        return np.fromfile(tensor.path, np.uint8, count, offset=place).reshape(last - first, tensor.row_bytes)

    def _read(self, path: Path) -> dict[str, Any]:
        """The metadata of a part, whose tensors are added to those of the other parts."""
        try:
            with _mapped(path) as data:
                metadata, tensors = self._read_header(_HeaderReader(data, path), path)
        except OSError as error:
            raise CheckpointError(
                f"{path}: can't be read ({error.strerror}). Check the path and its permissions"
            ) from None
        _check_extent(path, tensors)
        self.tensors |= {tensor.name: tensor for tensor in tensors}
        return metadata

    def _read_header(self, reader: _HeaderReader, path: Path) -> tuple[dict[str, Any], list[GgufTensor]]:
        reader.check_preamble()
        num_tensors, num_entries = reader.scalar("Q"), reader.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = reader.string()
            metadata[key] = reader.value(reader.value_type())
        table = [reader.tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise reader.damaged(f"general.alignment is {alignment!r}, expected a positive number")
        start = -(-reader.position // alignment) * alignment
        names = set(self.tensors)
        for name, *_ in table:
            if name in names:
                raise reader.damaged(f"tensor {name} is listed twice")
            names.add(name)
        return metadata, [GgufTensor(name, shape, kind, start + offset, path) for name, shape, kind, offset in table]


def _dequantized(stored: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """The weights of stored rows, float32 [rows, any].

    The library computes 16 rows at a time, for which the calls of numpy take longer than the work if rows are short. So
    it gets several rows as one.
    """
    elements, size = GGML_QUANT_SIZES[kind]
    columns = stored.shape[1] // size * elements
    joined = max(1, _ROW_ELEMENTS // max(columns, 1))
    whole = len(stored) - len(stored) % joined
    if not whole:
        return dequantize(stored, kind)
    values = dequantize(stored[:whole].reshape(whole // joined, -1), kind).reshape(whole, columns)
    return values if whole == len(stored) else np.concatenate((values, dequantize(stored[whole:], kind)))


def _check_extent(path: Path, tensors: list[GgufTensor]) -> None:
    described = max((tensor.offset + tensor.num_bytes for tensor in tensors), default=0)
    found = path.stat().st_size
    if found < described:
        raise CheckpointError(
            f"{path}: is truncated: {found:,} bytes found, {described:,} expected by its header. {_FETCH_AGAIN}"
        )


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap | bytes]:
    """The bytes of a file. Mapped only while its header is read, because its pages count as memory in use."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:  # not a mappable file
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


class _HeaderReader:
    """Reads consecutive little-endian values, never past the end of the file."""

    def __init__(self, data: mmap.mmap | bytes, path: Path) -> None:
        self._data = data
        self._path = path
        self._size = len(data)
        self.position = 0

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: damaged GGUF header at byte {self.position:,}: {what}. {_FETCH_AGAIN}")

    def check_preamble(self) -> None:
        magic = self._data[: len(_MAGIC)]
        self.position = len(magic)
        if magic != _MAGIC:
            raise CheckpointError(
                f"{self._path}: is no GGUF file: it starts with {magic!r}, expected {_MAGIC!r}. "
                "Name a .gguf file, or the folder of a Hugging Face checkpoint"
            )
        version = self.scalar("I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self._path}: GGUF version {version} found, expected {' or '.join(map(str, _VERSIONS))} in "
                "little-endian order. Convert the model again with a current converter"
            )

    def take(self, count: int) -> bytes:
        if count > self._size - self.position:
            raise CheckpointError(
                f"{self._path}: is truncated or damaged: {count:,} bytes expected at byte {self.position:,}, but the "
                f"file has {self._size:,} bytes. {_FETCH_AGAIN}"
            )
        self.position += count
        return self._data[self.position - count : self.position]

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Without a function call per value: a vocabulary has a hundred thousand, and every process of a pod reads
        them.
        """
        data, size, position, found = self._data, self._size, self.position, []
        length_at, width = _LENGTH.unpack_from, _LENGTH.size
        for _ in range(count):
            start = position + width
            end = start + (length_at(data, position)[0] if start <= size else 0)
            if start > size or end > size:
                self.position = position
                self.take(self.scalar("Q"))  # raises
            found.append(str(data[start:end], "utf-8", "replace"))
            position = end
        self.position = position
        return found

    def value_type(self) -> GGUFValueType:
        number = self.scalar("I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self.damaged(f"value type {number} is unknown") from None

    def value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            return self.array()
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind, length = self.value_type(), self.scalar("Q")
        if kind in _SCALARS:
            code = f"<{length}{_SCALARS[kind]}"
            return list(struct.unpack(code, self.take(length * struct.calcsize(f"<{_SCALARS[kind]}"))))
        if kind == GGUFValueType.ARRAY:
            raise self.damaged("an array of arrays, expected strings or numbers")
        return self.strings(length)

    def tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name, dimensions = self.string(), self.scalar("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self.damaged(f"tensor {name!r} has {dimensions} dimensions, expected 1 to {_MAX_DIMENSIONS}")
        shape = tuple(self.scalar("Q") for _ in range(dimensions))[::-1]
        number, offset = self.scalar("I"), self.scalar("Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self.damaged(f"tensor {name!r} has type {number}, which is unknown") from None
        if shape[-1] % GGML_QUANT_SIZES[kind][0]:
            raise self.damaged(
                f"tensor {name!r} has rows of {shape[-1]}, which {kind.name} can't divide into its blocks"
            )
        return name, shape, kind, offset
