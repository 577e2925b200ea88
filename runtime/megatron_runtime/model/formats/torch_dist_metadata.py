"""The ``.metadata`` file of ``torch.distributed.checkpoint``, read without executing pickled code.

It needs no torch: plain records replace its classes.
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
    """A dtype by its name in torch."""

    name: str
    itemsize: int
    """Bytes of a number."""


class PickledMetadata:
    """The contents of the file. Like the other records here, it has the pickled attributes without checks."""

    state_dict_metadata: dict[str, Any]
    storage_data: dict[Any, Any]


class TensorStorageMetadata:
    """A tensor: its type, its size, and the chunks that it is stored in."""

    properties: TensorProperties
    size: tuple[int, ...]
    chunks: list[Any]


class TensorProperties:
    """Properties of a tensor besides its size."""

    dtype: PickledDType

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]
        if not isinstance(self.dtype, PickledDType):
            raise TypeError("a tensor's type is none")


class _MetadataIndex:
    """The key of a chunk in ``storage_data``."""

    fqn: str
    offset: tuple[int, ...] | None = None

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _MetadataIndex) and (self.fqn, self.offset) == (other.fqn, other.offset)


class _Record:
    """Any other record."""


class _Nothing:
    """Replaces a record that is not needed: accepts any state, and keeps none."""

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
    # Megatron's own subclass, with additional data of the optimizer:
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): PickledMetadata,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "WindowsPath"): PurePosixPath,
}
"""The replacements of all classes that such a file may name. None of them executes code."""


_IGNORED_MODULES = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")
"""Modules of records that are not needed: Megatron adds the plan by which each rank saved its part."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and (match := _DTYPE.fullmatch(name)):
            return PickledDType(name, max(int(match[1] or 8) // 8, 1))
        if module.startswith(_IGNORED_MODULES):
            return _Nothing
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no such file needs")


def read_metadata(folder: Path) -> PickledMetadata:
    """The metadata of ``folder``. Raises CheckpointError if it is missing, damaged or contains unknown classes."""
    path = folder / TORCH_DIST_METADATA
    try:
        found = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror}). Check the path and its permissions") from None
    except Exception as error:  # a damaged pickle may raise any exception
        raise CheckpointError(
            f"{path}: is no metadata of torch.distributed.checkpoint ({error}). Fetch the file again"
        ) from None
    if not isinstance(found, PickledMetadata) or not isinstance(found.storage_data, dict):
        raise CheckpointError(f"{path}: holds no metadata of torch.distributed.checkpoint. Fetch the file again")
    return found
