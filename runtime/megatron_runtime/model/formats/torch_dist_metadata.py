"""The ``.metadata`` file of ``torch.distributed.checkpoint``, read without executing what a pickle may ask for.

Nor is torch imported: plain records stand in for its classes.
"""

from __future__ import annotations

import collections
import io
import pickle
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.formats.checkpoint_path import TORCH_DIST_METADATA

_RECORDS = "torch.distributed.checkpoint.metadata"
_OLDER_RECORDS = "torch.distributed._shard.sharded_tensor.metadata"
"""Written with a torch before 2.3."""
_DTYPE = re.compile(r"bool|(?:bfloat|float|complex|u?int|qu?int|bits)(\d+)\w*")


@dataclass(frozen=True)
class PickledDType:
    """A type of numbers by the name that torch gives it."""

    name: str
    itemsize: int
    """Bytes of a number."""


class PickledMetadata:
    """What the file says. Like the other records here it has the attributes that were pickled, whatever they are."""

    state_dict_metadata: dict[str, Any]
    storage_data: dict[Any, Any]


class TensorStorageMetadata:
    """A tensor: its type, its size, and the chunks that it is stored in."""

    properties: TensorProperties
    size: tuple[int, ...]
    chunks: list[Any]


class TensorProperties:
    """What a tensor is besides its size."""

    dtype: PickledDType

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]
        if not isinstance(self.dtype, PickledDType):
            raise TypeError("a tensor's type is none")


class _MetadataIndex:
    """Names a chunk of a tensor; a key of ``storage_data``."""

    fqn: str
    offset: tuple[int, ...] | None = None

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _MetadataIndex) and (self.fqn, self.offset) == (other.fqn, other.offset)


class _Record:
    """Any other record."""


class _Nothing:
    """What stands in for a record that is of no use: it takes whatever it is made of, and keeps nothing."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


_KNOWN: dict[tuple[str, str], Any] = {
    (_RECORDS, "Metadata"): PickledMetadata,
    (_RECORDS, "MetadataIndex"): _MetadataIndex,
    (_RECORDS, "TensorStorageMetadata"): TensorStorageMetadata,
    (_RECORDS, "TensorProperties"): TensorProperties,
    (_RECORDS, "ChunkStorageMetadata"): _Record,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch.serialization", "_get_layout"): _Nothing,
    ("torch", "Size"): tuple,
    (_OLDER_RECORDS, "TensorProperties"): TensorProperties,
    (_OLDER_RECORDS, "MEM_FORMAT_ENCODING"): _Nothing,
    # Megatron's own subclass, which adds notes on the optimizer:
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): PickledMetadata,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "WindowsPath"): PurePosixPath,
}
"""What stands in for all that such a file names and that is read. None does anything when made."""


_PASSED_OVER = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")
"""Modules whose other records aren't needed: Megatron adds the plan by which each rank saved its part."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and (match := _DTYPE.fullmatch(name)):
            return PickledDType(name, max(int(match[1] or 8) // 8, 1))
        if module.startswith(_PASSED_OVER):
            return _Nothing
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no such file needs")


def read_metadata(folder: Path) -> PickledMetadata:
    """What ``folder`` holds; CheckpointError when its metadata is missing, damaged or asks for anything unusual."""
    path = folder / TORCH_DIST_METADATA
    try:
        found = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror}). Check the path and its permissions") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(
            f"{path}: is no metadata of torch.distributed.checkpoint ({error}). Fetch the file again"
        ) from None
    if not isinstance(found, PickledMetadata) or not isinstance(found.storage_data, dict):
        raise CheckpointError(f"{path}: holds no metadata of torch.distributed.checkpoint. Fetch the file again")
    return found
