"""Weights in the layout of a CPU's matrix kernels, packed once instead of in every product."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor, nn

from megatron_runtime.cpu_features import has_tiles
from megatron_runtime.model.kernels import tile_products, vector_products
from megatron_runtime.model.kernels.recording import active_recording
from megatron_runtime.model.layers import Linear

_TILED_ROWS = 32
"""With up to this many rows, oneDNN's tile kernels (AMX) add in one order. With more, the order depends on their number
and on the matrix. Longer prompts are divided, which costs a part of the tiles' speed, in float16 and where `TileLinear`
can't be used.
"""


class PackedLinear(nn.Module):
    """``y = x W^T + b`` by oneDNN, with the results of `Linear`, on a CPU only. Keeps no other copy of its matrix."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        # Not a parameter, because modules move and copy parameters in ways that an opaque layout doesn't support.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self._height = len(weight)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._most_rows = _TILED_ROWS if weight.dtype is not torch.float32 and has_tiles() else None

    @property
    def weight(self) -> Tensor:
        """An unpacked copy of the matrix, [out, in]."""
        plain: Tensor = self._packed.to_dense()
        return plain

    def forward(self, inputs: Tensor) -> Tensor:
        """[T, in] to [T, out]; the bits of a row do not depend on the others."""
        if self._most_rows is None or len(inputs) <= self._most_rows:
            return self._multiply(inputs)
        return torch.cat([self._multiply(rows) for rows in torch.split(inputs, self._most_rows)])

    def _multiply(self, inputs: Tensor) -> Tensor:
        if (recording := active_recording()) is None:
            return self._product(inputs)
        outputs = recording.tensor((inputs.shape[0], self._height), inputs.dtype)
        recording.noting(self._write_product)(inputs, outputs)
        return outputs

    def _write_product(self, inputs: Tensor, outputs: Tensor) -> None:
        outputs.copy_(self._product(inputs))

    def _product(self, inputs: Tensor) -> Tensor:
        if len(inputs) == 1:
            # oneDNN has a separate kernel for single rows, which adds in another order; the bits must not depend on the
            # batch.
            return self._product(inputs.expand(2, -1).contiguous())[:1]
        outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")
        return outputs


class PanelLinear(nn.Module):
    """The same by a kernel of this project, for matrices in panels."""

    _products: ModuleType

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self._height, self._width = weight.shape
        self._panels: Tensor = self._products.pack(weight.detach())
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """An unpacked copy of the matrix, [out, in]."""
        plain: Tensor = self._products.unpack(self._panels, self._height, self._width)
        return plain

    def forward(self, inputs: Tensor) -> Tensor:
        """[T, in] to [T, out]; the bits of a row do not depend on the others."""
        if torch._C._autograd._profiler_enabled():  # which records PyTorch's operators alone
            with torch.profiler.record_function("linear"):
                return self._multiply(inputs)
        return self._multiply(inputs)

    def _multiply(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self._products.multiply(inputs.contiguous(), self._panels, self.bias, self._height)
        return outputs


class TileLinear(PanelLinear):
    """In bfloat16 by tiles, with the bits of oneDNN's products of up to _TILED_ROWS rows."""

    _products = tile_products


class VectorLinear(PanelLinear):
    """In float32 or bfloat16 by vectors."""

    _products = vector_products


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN is available and computes in ``dtype`` on this processor."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def pack_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear | PanelLinear:
    """Made of a matrix and a bias whose dtype `can_pack` accepts."""
    if _uses_tiles(weight.dtype):
        return TileLinear(weight, bias)
    if vector_products.can_use_vectors(weight.dtype):
        return VectorLinear(weight, bias)
    return PackedLinear(weight, bias)


def prepare_products(dtype: torch.dtype) -> None:
    """Compile the kernels of matrices of a dtype now, so that the first request does not wait for them."""
    products = tile_products if _uses_tiles(dtype) else vector_products
    products.prepare(dtype)


def _uses_tiles(dtype: torch.dtype) -> bool:
    return dtype is torch.bfloat16 and tile_products.can_use_tiles()


def pack_linears(module: nn.Module) -> None:
    """Replace every `Linear` in ``module``, one by one, so that only one matrix at a time exists twice."""
    for name, child in module.named_children():
        if isinstance(child, Linear):
            setattr(module, name, pack_linear(child.weight, child.bias))
        else:
            pack_linears(child)
