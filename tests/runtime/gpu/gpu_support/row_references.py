"""Operations on rows in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

EPS = 1e-5
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda gate: functional.gelu(gate, approximate="tanh"),
    "relu_squared": lambda gate: functional.relu(gate).square(),
}
"""By the names of `rows.ACTIVATIONS`."""


def norm_of(given: Tensor, weight: Tensor, bias: Tensor | None = None, kind: str = "rms") -> Tensor:
    """Of one of `rows.NORMS`, with EPS; "layer" has a bias."""
    wide, factor = given.double(), weight.double()
    if kind == "layer":
        assert bias is not None
        return functional.layer_norm(wide, weight.shape, factor, bias.double(), EPS)
    factor = 1 + factor if kind == "rms_plus_one" else factor
    return factor * wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()


def clamped_gate(gate: Tensor, value: Tensor, alpha: float, limit: float) -> Tensor:
    """That of `ClampedGate`, of values in float64."""
    gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (value + 1)
