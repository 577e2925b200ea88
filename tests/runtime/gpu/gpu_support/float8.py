"""Random matrices in fp8, and their products in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_runtime.gpu import float8
from megatron_runtime.model.layers import Linear
from megatron_runtime.model.quantized.float8_linear import Float8Linear


@dataclass(frozen=True)
class Float8Case:
    """Inputs [T, in], and a matrix."""

    inputs: Tensor
    codes: Tensor
    """float8 [out, in]."""
    scales: Tensor
    """float32 [groups, out]."""
    group: int
    bias: Tensor | None

    @classmethod
    def random(
        cls,
        rows: int,
        channels: int,
        size: int,
        *,
        group: int | None = None,
        kind: torch.dtype = torch.float8_e4m3fn,
        is_biased: bool = False,
    ) -> Float8Case:
        """The same seed for all cases; without ``group``, a row has one scale."""
        generator = torch.Generator().manual_seed(5)
        group = group or size
        codes = (torch.randn(channels, size, generator=generator) * 3).to(kind)
        scales = 10 ** torch.randn(-(-size // group), channels, generator=generator) * 1e-2
        inputs = torch.randn(rows, size, generator=generator)
        return cls(inputs, codes, scales, group, torch.randn(channels, generator=generator) if is_biased else None)

    def as_type(self, dtype: torch.dtype) -> Float8Case:
        """With inputs of a type."""
        return replace(self, inputs=self.inputs.to(dtype), bias=None if self.bias is None else self.bias.to(dtype))

    def rows(self, start: int, stop: int) -> Float8Case:
        """Some of the inputs."""
        return replace(self, inputs=self.inputs[start:stop])

    def on(self, device: torch.device) -> Float8Case:
        """A copy on this device."""
        inputs, codes, scales = (each.to(device) for each in (self.inputs, self.codes.view(torch.uint8), self.scales))
        bias = None if self.bias is None else self.bias.to(device)
        return replace(self, inputs=inputs, codes=codes.view(self.codes.dtype), scales=scales, bias=bias)

    def multiply(self, *, rows_are_fixed: bool = False) -> Tensor:
        """By the kernel."""
        exponent = float8.EXPONENTS[self.codes.dtype]
        weights = float8.Float8Weights(self.codes.view(torch.uint8), self.scales, self.group, exponent)
        return float8.multiply(self.inputs, weights, self.bias, rows_are_fixed=rows_are_fixed)

    def expected(self) -> Tensor:
        """In float64, for tensors of the host."""
        scales = self.scales.t().double().repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]
        product = self.inputs.double() @ (self.codes.double() * scales).t()
        return product if self.bias is None else product + self.bias.double()


def quantize_linears(model: nn.Module, group: int | None) -> None:
    """Replace the linear layers of a model, but routers, by such with matrices in fp8, with a scale for ``group``
    columns of a row; None: for a row."""
    for name, child in model.named_children():
        if name == "router":
            continue
        if isinstance(child, Linear):
            setattr(model, name, _quantized(child, group or child.weight.shape[1]))
        else:
            quantize_linears(child, group)


@torch.no_grad()
def _quantized(linear: Linear, group: int) -> Float8Linear:
    (rows, columns), kind = linear.weight.shape, torch.float8_e4m3fn
    groups = -(-columns // group)
    padded = functional.pad(linear.weight.float(), (0, groups * group - columns)).view(rows, groups, group)
    scales = padded.abs().amax(-1) / torch.finfo(kind).max
    codes = (padded / scales[..., None]).flatten(1)[:, :columns].to(kind)
    with linear.weight.device:
        made = Float8Linear(rows, columns, group, kind, linear.bias, linear.weight.dtype)
    made.fill(0, codes, scales)
    return made
