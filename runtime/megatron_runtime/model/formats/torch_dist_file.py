"""The tensors of a ``torch.distributed.checkpoint`` folder, one chunk at a time."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.formats.torch_dist_metadata import PickledMetadata, TensorStorageMetadata, read_metadata

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class _Chunk:
    """A chunk of a tensor, and its place in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class TorchDistFile:
    """Reads rows of tensors, or of one entry of stacked ones. Caches the last chunk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, TensorStorageMetadata] = {}
        """Size and type by name; entries that are no tensors are left out."""
        self._chunks: dict[str, list[_Chunk]] = {}
        self._last: tuple[_Chunk, Tensor] | None = None
        try:
            self._take(read_metadata(folder))
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder}: its metadata is damaged ({error}). Fetch the checkpoint again") from None

    def read(self, name: str, index: tuple[int, ...], rows: range) -> Tensor:
        """Some rows at ``index`` of a tensor's first dimensions, on the CPU and in the type of the file."""
        import torch  # Imported here, because reading the metadata does not need it.

        stored = self.tensors[name]
        _, *width = stored.size[len(index) :]
        start = [*index, rows.start, *(0 for _ in width)]
        shape = [*(1 for _ in index), len(rows), *width]
        whole = torch.empty(shape, dtype=getattr(torch, stored.properties.dtype.name))
        filled = 0
        for chunk in self._chunks[name]:
            bounds = list(zip(start, shape, chunk.offsets, chunk.sizes, strict=True))
            low = [max(s, o) for s, _, o, _ in bounds]
            high = [min(s + n, o + m) for s, n, o, m in bounds]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            to = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
            of = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets, strict=True))
            whole[to] = self._load(name, chunk)[of]
            filled += whole[to].numel()
        if filled != whole.numel():
            raise CheckpointError(
                f"{self.folder}: {filled:,} of the {whole.numel():,} numbers in tensor {name} found. "
                "Fetch the whole checkpoint again"
            )
        return whole[(0,) * len(index)]

    def _take(self, found: PickledMetadata) -> None:
        for name, stored in found.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                self.tensors[name] = stored
                self._chunks[name] = []
        for index, info in found.storage_data.items():
            if index.fqn not in self.tensors:
                continue
            if getattr(info, "transform_descriptors", None):
                raise CheckpointError(f"{self.folder}: tensor {index.fqn} is compressed. Save it without extensions")
            if PurePath(info.relative_path).name != info.relative_path:
                raise CheckpointError(
                    f"{self.folder}: tensor {index.fqn} lies in {info.relative_path}, outside the folder"
                )
            sizes = self._sizes(index.fqn, index.offset)
            self._chunks[index.fqn].append(
                _Chunk(tuple(index.offset), sizes, info.relative_path, info.offset, info.length)
            )

    def _sizes(self, name: str, offset: tuple[int, ...]) -> tuple[int, ...]:
        for chunk in self.tensors[name].chunks:
            if chunk.offsets == offset:
                return tuple(chunk.sizes)
        raise CheckpointError(f"{self.folder}: the metadata of tensor {name} is damaged. Fetch the checkpoint again")

    def _load(self, name: str, chunk: _Chunk) -> Tensor:
        if self._last is not None and self._last[0] == chunk:
            return self._last[1]
        import torch

        self._last = None  # released before the next chunk is read
        path = self.folder / chunk.file
        try:
            with path.open("rb") as file:
                file.seek(chunk.start)
                found = torch.load(io.BytesIO(file.read(chunk.length)), map_location="cpu", weights_only=True)
            loaded: Tensor = found.detach().reshape(chunk.sizes)
        except Exception as error:  # torch.load may raise any exception for a damaged file
            raise CheckpointError(
                f"{path}: tensor {name} can't be read ({str(error).splitlines()[0]}). Fetch the file again"
            ) from None
        self._last = (chunk, loaded)
        return loaded
