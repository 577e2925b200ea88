"""Files with one tensor for all experts of a layer, whose experts get names of their own here.

Qwen3.5, Llama 4 and gpt-oss store the matrices of all experts together, with gates and values in one; the last two
transpose them. gpt-oss is also published in MXFP4 (Open Compute Project, Microscaling Formats): blocks of 32 numbers of
4 bits share an exponent. Qwen3.5 is also published with the matrices of single experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.formats.tensor_names import tensor_names
from megatron_runtime.model.formats.weight_source import StoredTensor, WeightSource, row_pieces

if TYPE_CHECKING:
    from torch import Tensor

PACKED = ("_blocks", "_scales")
"""Ends of the names of MXFP4 tensors: uint8 [experts, out, in / 32, 16], two numbers in a byte, the first one in the
lower bits; and uint8 [experts, out, in / 32], the exponents plus 127."""
_BLOCK = 32
_BIAS = 127
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class _ExpertPart:
    """A matrix or a bias of one expert: the rows ``first``, ``first + step``... of a stored matrix, whose rows are
    columns if it is transposed.
    """

    stored: str
    """Of MXFP4 without the end of the name."""
    expert: int
    first: int
    step: int
    shape: tuple[int, ...]
    num_bytes: int
    kind: str


class StackedExperts:
    """The tensors of ``source``, those of the experts under the names that `TensorNames` gives to single experts."""

    reads_in_threads = False

    def __init__(self, source: WeightSource, config: ModelConfig) -> None:
        self._source = source
        self._names = tensor_names(config.architecture)
        layer = re.escape(self._names.layer).replace(r"\{\}", r"\d+")
        stack = re.escape(self._names.expert.removesuffix("{}."))
        self._stack = re.compile(rf"({layer}){stack}(gate_up|down)_proj(_bias|_blocks)?")

    @property
    def location(self) -> str:
        """The file or folder."""
        return self._source.location

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors, with those of single experts."""
        scales = {name.removesuffix("_blocks") + "_scales" for name in self._source.tensors if name.endswith("_blocks")}
        others = {
            name: tensor
            for name, tensor in self._source.tensors.items()
            if not self._stack.fullmatch(name) and name not in scales
        }
        parts = {name: StoredTensor(part.shape, part.num_bytes, part.kind) for name, part in self._parts.items()}
        return others | parts

    def read(self, name: str, into: Tensor, start: Sequence[int]) -> Iterator[int]:
        """Copy a part into ``into`` in chunks; yields the number of elements of each."""
        if (part := self._parts.get(name)) is None:
            yield from self._source.read(name, into, start)
        elif part.kind == "MXFP4":
            yield from self._read_packed(part, into, start)
        elif into.dim() == 1:
            row = self._buffer(part, into, (part.expert, part.first + part.step * start[0]), (len(into),))
            into.copy_(row)
            yield into.numel()
        elif self._names.stacked_experts == "rows":
            for piece in row_pieces(tuple(into.shape)):
                rows = into[piece]
                begin = (part.expert, part.first + start[0] + piece.start, start[1])
                rows.copy_(self._buffer(part, rows, begin, tuple(rows.shape)))
                yield rows.numel()
        else:
            for piece in row_pieces(tuple(into.t().shape)):
                columns = into[:, piece]
                begin = (part.expert, start[1] + piece.start, part.first + part.step * start[0])
                columns.copy_(self._buffer(part, into, begin, tuple(columns.t().shape)).t())
                yield columns.numel()

    def _buffer(self, part: _ExpertPart, like: Tensor, begin: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The ``shape`` that begins at ``begin`` of the stored tensor, every ``step``-th of the last dimension."""
        span = part.step * (shape[-1] - 1) + 1
        read = like.new_empty(1, *shape[:-1], span, device="cpu")
        for _ in self._source.read(part.stored, read, begin):
            pass
        return read[0, ..., :: part.step]

    def _read_packed(self, part: _ExpertPart, into: Tensor, start: Sequence[int]) -> Iterator[int]:
        import torch  # Imported here, because reading the header does not need it.

        first_block, last_block = start[1] // _BLOCK, -(-(start[1] + into.shape[1]) // _BLOCK)
        before = start[1] - first_block * _BLOCK
        values = torch.tensor([*_FP4, *(-number for number in _FP4)])
        for piece in row_pieces((into.shape[0], (last_block - first_block) * _BLOCK)):
            rows = into[piece]
            begin = (part.expert, part.first + part.step * (start[0] + piece.start), first_block)
            shape = (1, part.step * (len(rows) - 1) + 1, last_block - first_block)
            blocks, scales = (torch.empty(each, dtype=torch.uint8) for each in ((*shape, _BLOCK // 2), shape))
            for stored, read, at in (("_blocks", blocks, (*begin, 0)), ("_scales", scales, begin)):
                for _ in self._source.read(part.stored + stored, read, at):
                    pass
            blocks, scales = blocks[0, :: part.step], scales[0, :: part.step]
            numbers = values[torch.stack((blocks & 15, blocks >> 4), dim=-1).int()].flatten(-2)
            scaled = torch.ldexp(numbers, scales[..., None].int() - _BIAS).flatten(-2)
            rows.copy_(scaled[:, before : before + into.shape[1]])
            yield rows.numel()

    @cached_property
    def _parts(self) -> dict[str, _ExpertPart]:
        parts: dict[str, _ExpertPart] = {}
        for name, tensor in self._source.tensors.items():
            if (match := self._stack.fullmatch(name)) and len(tensor.shape) >= 2:
                parts |= self._split(name, tensor, *match.groups())
        return parts

    def _split(
        self, name: str, tensor: StoredTensor, prefix: str, matrix: str, end: str | None
    ) -> dict[str, _ExpertPart]:
        """The parts of a stacked tensor by their names."""
        count, shape, num_bytes, kind = tensor.shape[0], tensor.shape[1:], tensor.num_bytes, tensor.kind
        if end == "_blocks":
            name, kind = name.removesuffix(end), "MXFP4"
            shape = (shape[0], _BLOCK * shape[1]) if len(shape) == 3 else shape
            scales = self._source.tensors.get(f"{name}_scales")
            num_bytes += 0 if scales is None else scales.num_bytes
        elif end is None and self._names.stacked_experts != "rows":
            shape = shape[::-1]
        gate, up = self._names.expert_gate_up
        names, first, step = [self._names.expert_down], [0], 1
        if matrix == "gate_up":
            shape = (shape[0] // 2, *shape[1:])
            names, first = [gate, up], [0, shape[0]]
            if self._names.stacked_experts == "interleaved":
                first, step = [0, 1], 2
        kinds = "bias" if end == "_bias" else "weight"
        size = num_bytes // max(count * len(names), 1)
        return {
            f"{prefix}{self._names.expert.format(expert)}{each}.{kinds}": _ExpertPart(
                name, expert, begin, step, shape, size, kind
            )
            for expert in range(count)
            for each, begin in zip(names, first, strict=True)
        }


def single_experts(source: WeightSource, config: ModelConfig) -> WeightSource:
    """``source`` with a name for each matrix of each expert."""
    return StackedExperts(source, config) if tensor_names(config.architecture).stacked_experts else source
