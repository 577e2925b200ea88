"""The ``.metadata`` file of ``torch.distributed.checkpoint``, read without executing what a pickle may ask for."""

from __future__ import annotations

import collections
import io
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import metadata as sharded
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata
from torch.serialization import _get_layout

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.checkpoint_path import TORCH_DIST_METADATA

_KNOWN: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("torch", "Size"): torch.Size,
    # Written with a torch before 2.3:
    (sharded.__name__, "TensorProperties"): sharded.TensorProperties,
    (sharded.__name__, "MEM_FORMAT_ENCODING"): sharded.MEM_FORMAT_ENCODING,
    # Megatron's own subclass, which adds notes on the optimizer:
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): Metadata,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "WindowsPath"): PurePosixPath,
}
"""All that such a file names: plain records, and a look-up of a layout by its name. None does anything when made."""


_PASSED_OVER = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")
"""Modules whose other records aren't needed: Megatron adds the plan by which each rank saved its part."""


class _Nothing:
    """What stands in for such a record: it takes whatever it is made of, and keeps nothing."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module.startswith(_PASSED_OVER):
            return _Nothing
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no such file needs")


def read_metadata(folder: Path) -> Metadata:
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
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise CheckpointError(f"{path}: holds no metadata of torch.distributed.checkpoint. Fetch the file again")
    return found
