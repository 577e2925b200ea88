"""Quantized matrices of safetensors in the codings of the kernels that compute with quantized weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.formats.coded_rows import BLOCK, CODINGS, CodedRows, Coding

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_runtime.model.formats.quantization.stored_matrix import QuantizedPart

_SYMMETRIC = {4: "Q4_0", 8: "Q8_0"}
"""The ggml type of codes with the zero point in the middle of the range. By bits."""
_WITH_ZEROS = {4: "Q4_1"}
"""The same with a zero point for each group, which becomes the min of its blocks."""


def coding_of(bits: int, columns: int, width: int, *, symmetric: bool) -> Coding | None:
    """The coding of a matrix with groups of ``width`` consecutive columns; None if it can't stay quantized.

    A block of the kernels has 32 columns with one scale, which is that of its group.
    """
    if columns % BLOCK or (width % BLOCK and width < columns):
        return None
    kind = (_SYMMETRIC if symmetric else _WITH_ZEROS).get(bits)
    return None if kind is None else CODINGS[kind]


def coded_rows(part: QuantizedPart, coding: Coding, name: str) -> CodedRows:
    """A part whose columns are whole blocks. Scales and mins are rounded to float16.

    Raises CheckpointError, with ``name``, if the part contradicts the settings from which `coding_of` follows, or if
    scales exceed float16.
    """
    import torch  # Imported here, because reading the header does not need it.

    blocks = part.groups[::BLOCK]
    if not torch.equal(part.groups, blocks.repeat_interleave(BLOCK)):
        raise _refuse(name, "has groups of columns that aren't consecutive, but the configuration says that they are")
    scales, mins = _of_blocks(part.scales, blocks), None
    if coding.has_mins:
        zeros = part.zeros if not isinstance(part.zeros, float) else torch.full_like(part.scales, part.zeros)
        mins = _of_blocks(-zeros * part.scales, blocks)
    elif not bool((torch.as_tensor(part.zeros) == coding.offset).all()):
        raise _refuse(name, f"has zero points other than {coding.offset}, but the configuration says it is symmetric")
    if not all(bool(numbers.isfinite().all()) for numbers in (scales, mins) if numbers is not None):
        raise _refuse(name, "has scales that float16 can't represent")
    numbers = [scales.numpy()] if mins is None else [scales.numpy(), mins.numpy()]
    stored = _blocks_of(part.codes.numpy(), numbers, coding.bits)
    return CodedRows.of((_WITH_ZEROS if coding.has_mins else _SYMMETRIC)[coding.bits], stored)


def _of_blocks(numbers: Tensor, blocks: Tensor) -> Tensor:
    """float16 [rows, blocks]."""
    return numbers.index_select(1, blocks).half()


def _blocks_of(codes: NDArray[np.uint8], numbers: list[NDArray[np.float16]], bits: int) -> NDArray[np.uint8]:
    """Blocks of the types above, uint8 [rows, bytes of a row]: the numbers of a block, then its codes [rows, columns].

    Codes of 4 bits are in the halves of 16 bytes: the first 16 columns in the low ones. Those of 8 bits are signed.
    """
    blocks: NDArray[Any] = codes.reshape(len(codes), -1, BLOCK)
    low, high = blocks[..., : BLOCK // 2], blocks[..., BLOCK // 2 :]
    stored = blocks ^ np.uint8(0x80) if bits == 8 else low | high << np.uint8(4)
    heads = [np.ascontiguousarray(number)[..., None].view(np.uint8) for number in numbers]
    return np.concatenate((*heads, stored), axis=-1).reshape(len(codes), -1)


def _refuse(name: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{name} {reason}. Use --quantized-weights expand")
