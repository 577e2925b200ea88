"""Safetensors files, single or sharded, as a source of weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.formats.config_fields import read_json
from megatron_runtime.model.formats.stacked_experts import PACKED
from megatron_runtime.model.formats.tensor_names import ignored_prefixes, name_of_tied_head, tensor_names
from megatron_runtime.model.formats.weight_source import StoredTensor, row_pieces

if TYPE_CHECKING:
    from torch import Tensor

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
CODED_TYPES = {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}
"""Bytes of the types of quantized matrices and of their scales, which a ``quantization_config`` explains."""
_HEADER, _TENSORS = "np", "pt"
"""The framework for opening files: numpy has no bfloat16, but needs no torch for names, types and shapes."""
_COMPUTED_ELSEWHERE = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Buffers of old checkpoints that follow from the configuration: rotary frequencies, causal masks."""


class SafetensorsWeights:
    """The tensors of a checkpoint's folder, or of one file; those of the types in CODED_TYPES only if it is
    ``quantized``.

    Raises CheckpointError for files that are missing, damaged or of a wrong type.
    """

    reads_in_threads = False

    def __init__(self, path: Path, config: ModelConfig, *, quantized: bool = False) -> None:
        self._path = path
        self._bytes_of_types = _ELEMENT_BYTES | (CODED_TYPES if quantized else {})
        self._config = config
        self._last: tuple[tuple[Path, str], Any] | None = None

    @property
    def location(self) -> str:
        """The path."""
        return str(self._path)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors of the files, without other parts of the model, the copy of a tied head, and implied buffers."""
        ignored = ignored_prefixes(self._config)
        copy = name_of_tied_head(self._config)
        found: dict[str, StoredTensor] = {}
        for name, in_file in self._in_files.items():
            of_no_use = in_file.endswith(_COMPUTED_ELSEWHERE) or in_file.startswith(ignored) or in_file == copy
            if not of_no_use:
                found[name] = self._describe(in_file, self._open(self._files[in_file]))
        return found

    def read(self, name: str, into: Tensor, start: Sequence[int]) -> Iterator[int]:
        """Copy a part into ``into`` in chunks; yields the number of elements of each."""
        in_file = self._in_files[name]
        view = self._open(self._files[in_file], _TENSORS).get_slice(in_file)
        if not into.dim():
            into.copy_(view[()])
            yield 1
            return
        columns = [slice(begin, begin + size) for begin, size in zip(start[1:], into.shape[1:], strict=True)]
        for part in row_pieces(tuple(into.shape)):
            rows = slice(start[0] + part.start, start[0] + part.stop)
            into[part] = view[(rows, *columns)].to(device=into.device, dtype=into.dtype)
            yield into[part].numel()

    @cached_property
    def _in_files(self) -> dict[str, str]:
        """The names in the files by the usual ones.

        They lack a prefix in a checkpoint that was saved without a head, such as that of GPT-2; a text model that was
        saved after it was a part of a multimodal one may have a longer prefix.
        """
        names = tensor_names(self._config.architecture)
        prefix, _, embedding = names.embedding.partition(".")
        if f"{embedding}.weight" in self._files:
            return {f"{prefix}.{name}": name for name in self._files}
        longer = names.longer_prefix
        if longer and f"{longer}{embedding}.weight" in self._files:
            return {re.sub(f"^{re.escape(longer)}", f"{prefix}.", name): name for name in self._files}
        return {name: name for name in self._files}

    @cached_property
    def _files(self) -> dict[str, Path]:
        """The file that holds each tensor."""
        files: dict[str, Path] = {}
        for path in self._paths():
            files |= dict.fromkeys(_names(self._open(path)), path)
        return files

    def _open(self, path: Path, contents: str = _HEADER) -> Any:
        """The file, mapped. Only one at a time, because pages of mapped files count as memory in use."""
        if self._last is None or self._last[0] != (path, contents):
            self._last = None
            try:
                self._last = ((path, contents), safe_open(path, framework=contents))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: can't be read as safetensors ({error}). Fetch the file again") from None
        return self._last[1]

    def _paths(self) -> list[Path]:
        if self._path.is_file():
            return [self._path]
        if (index := self._path / _INDEX).exists():
            shards = read_json(index).get("weight_map")
            if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
                raise CheckpointError(f"{index}: weight_map is missing or damaged. Fetch the file again")
            paths = [self._path / name for name in sorted(set(shards.values()))]
            if missing := [path.name for path in paths if not path.exists()]:
                raise CheckpointError(f"{self._path}: {', '.join(missing)} missing, named by {_INDEX}. Fetch them")
            return paths
        if (single := self._path / _SINGLE).exists():
            return [single]
        raise CheckpointError(
            f"{self._path}: neither {_SINGLE} nor {_INDEX} found. "
            "Weights are read from safetensors only: convert a checkpoint of another kind"
        )

    def _describe(self, name: str, file: Any) -> StoredTensor:
        view = file.get_slice(name)
        kind, shape = view.get_dtype(), tuple(view.get_shape())
        if kind == "U8" and name.endswith(PACKED):
            return StoredTensor(shape, math.prod(shape), kind)
        if kind not in self._bytes_of_types:
            raise CheckpointError(
                f"{self._path}: tensor {name} has type {kind}, expected one of {', '.join(self._bytes_of_types)}. "
                "Choose a checkpoint that isn't quantized, one with a quantization_config in its config.json, "
                "or a GGUF file"
            )
        num_bytes = self._bytes_of_types[kind]
        for size in shape:
            num_bytes *= size
        return StoredTensor(shape, num_bytes, kind)


def _names(file: Any) -> list[str]:
    return list(file.keys())
