"""A checkpoint whose quantized matrices have the names and shapes of plain ones, and expand while they are read."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.formats.expected_tensors import expected_tensors
from megatron_runtime.model.formats.quantization.float8 import Float8Matrix
from megatron_runtime.model.formats.quantization.kept_codes import coded_rows
from megatron_runtime.model.formats.quantization.quantization_config import Quantization
from megatron_runtime.model.formats.quantization.stored_matrix import StoredMatrix, StoredModule
from megatron_runtime.model.formats.safetensors_checkpoint import CODED_TYPES
from megatron_runtime.model.formats.tensor_names import name_of_tied_head
from megatron_runtime.model.formats.weight_source import StoredTensor, WeightSource, row_pieces

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_runtime.model.formats.coded_rows import CodedRows
    from megatron_runtime.model.formats.quantization.stored_matrix import QuantizedPart

_UNUSED = tuple(
    f"{of}_{number}" if of else number
    for of in ("input", "output", "activation", "k", "v", "q", "kv")
    for number in ("scale", "zero_point", "scale_ub", "global_scale")
)
"""Ends of the names of numbers that round activations or the cache, which are in the dtype here."""
_GPTQ = "qweight"
_PIECE_SHARE = 4
"""Pieces are smaller than others, because each is expanded in several steps."""

_logger = logging.getLogger(__name__)


class QuantizedCheckpoint:
    """The tensors of ``source``, with one tensor for each quantized matrix: its ``weight``."""

    reads_in_threads = False
    """PyTorch's operators use all processors."""

    def __init__(self, source: WeightSource, config: ModelConfig, quantization: Quantization) -> None:
        self._source = source
        self._quantization = quantization
        self._expected = expected_tensors(config)
        self._unused_head = (name_of_tied_head(config) or "").removesuffix("weight")

    @property
    def location(self) -> str:
        """The file or folder."""
        return self._source.location

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors, with those of quantized matrices. Raises CheckpointError if one can't be read."""
        coded = {
            f"{matrix.module.name}.{ending}" for matrix in self._matrices.values() for ending in matrix.module.tensors
        }
        plain, unused = {}, Counter[str]()
        for name, tensor in self._stored.items():
            if name in coded or name in self._zero_biases:
                continue
            ending = name.rpartition(".")[2]
            if ending in _UNUSED:
                unused[ending] += 1
            else:
                self._check_plain(name, tensor)
                plain[name] = tensor
        if unused:
            listed = ", ".join(f"{count} {ending}" for ending, count in sorted(unused.items()))
            _logger.info("%s: scales of activations and of the cache are not used: %s", self.location, listed)
        return plain | {name: _describe(matrix) for name, matrix in self._matrices.items()}

    def read(self, name: str, into: Tensor, start: Sequence[int]) -> Iterator[int]:
        """Copy a part into ``into`` in chunks, expanded; yields the number of elements of each."""
        if (matrix := self._matrices.get(name)) is None:
            yield from self._source.read(name, into, start)
            return
        self._check_bias(matrix)
        columns = range(start[1], start[1] + into.shape[1])
        for piece in row_pieces((into.shape[0], _PIECE_SHARE * into.shape[1])):
            rows = range(start[0] + piece.start, start[0] + piece.stop)
            into[piece] = matrix.part(rows, columns).expand().to(device=into.device, dtype=into.dtype)
            yield into[piece].numel()

    def read_coded(self, name: str, rows: range, columns: slice) -> Iterator[CodedRows]:
        """As in CodedSource. Raises CheckpointError if the codes don't fit the settings of the checkpoint."""
        matrix = self._matrices[name]
        assert matrix.coding is not None
        self._check_bias(matrix)
        across = range(columns.start, columns.stop)
        for piece in row_pieces((len(rows), _PIECE_SHARE * len(across))):
            part = matrix.part(rows[piece], across)
            yield coded_rows(part, matrix.coding, f"{self.location}: tensor {name}")

    def read_parts(self, name: str, rows: range, columns: range) -> Iterator[QuantizedPart]:
        """As in Float8Source."""
        for piece in row_pieces((len(rows), _PIECE_SHARE * len(columns))):
            yield self._matrices[name].part(rows[piece], columns)

    @cached_property
    def _stored(self) -> dict[str, StoredTensor]:
        """Without those of a head that is tied to the embedding."""
        head = self._unused_head
        return {name: each for name, each in self._source.tensors.items() if not head or not name.startswith(head)}

    @cached_property
    def _matrices(self) -> dict[str, StoredMatrix]:
        """The quantized matrices by the names of their weights."""
        modules: dict[str, dict[str, StoredTensor]] = {}
        for name, tensor in self._stored.items():
            module, _, ending = name.rpartition(".")
            if ending in self._quantization.endings:
                modules.setdefault(module, {})[ending] = tensor
        found = {}
        for module, tensors in modules.items():
            name = f"{module}.weight"
            stored = StoredModule(self._source, module, tensors, self._expected.get(name))
            if (matrix := self._quantization.matrix(stored)) is not None:
                found[name] = matrix
        return found

    @cached_property
    def _zero_biases(self) -> frozenset[str]:
        """Biases of GPTQ modules that have none in the configuration: early versions of AutoGPTQ stored zeros."""
        names = (_bias(matrix) for matrix in self._matrices.values() if _GPTQ in matrix.module.tensors)
        return frozenset(name for name in names if name in self._stored and name not in self._expected)

    def _check_bias(self, matrix: StoredMatrix) -> None:
        """Raise CheckpointError if a bias that the configuration doesn't have is more than zeros."""
        import torch  # Imported here, because reading the header does not need it.

        if (name := _bias(matrix)) not in self._zero_biases:
            return
        bias = torch.empty(self._stored[name].shape)
        for _ in self._source.read(name, bias, [0] * bias.dim()):
            pass
        if bool(bias.any()):
            raise CheckpointError(
                f"{self.location}: tensor {name} isn't zero, but the configuration has no such bias. "
                "The configuration belongs to another checkpoint"
            )

    def _check_plain(self, name: str, tensor: StoredTensor) -> None:
        if tensor.kind in CODED_TYPES:
            raise CheckpointError(
                f"{self.location}: tensor {name} has type {tensor.kind}, but is no part of a quantized matrix that "
                "quantization_config describes. Choose another checkpoint, such as one that isn't quantized"
            )


def _bias(matrix: StoredMatrix) -> str:
    return f"{matrix.module.name}.bias"


def _describe(matrix: StoredMatrix) -> StoredTensor:
    num_bytes = sum(each.num_bytes for each in matrix.module.tensors.values())
    float8 = matrix.float8 if isinstance(matrix, Float8Matrix) else None
    return StoredTensor(matrix.shape, num_bytes, matrix.kind, matrix.coding, float8)
