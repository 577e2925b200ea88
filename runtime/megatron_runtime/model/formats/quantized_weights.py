"""The choice whether matrices that a checkpoint stores quantized stay so in memory, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatron_runtime.errors import ConfigurationError

QUANTIZED_WEIGHTS = ("expand", "keep")
"""``expand``: converted to the dtype. ``keep``: as stored: on a CPU codes of integers, with inputs of products rounded
to int8; on a GPU matrices in fp8, with inputs that are not rounded."""


class KeptKind(StrEnum):
    """Which matrices of a checkpoint stay quantized."""

    NONE = "none"
    INTEGERS = "integers"
    """Codes of integers, on a CPU."""
    FLOAT8 = "float8"
    """8-bit floating-point numbers, on a GPU."""


@dataclass(frozen=True)
class KeptWeights:
    """Weights of the whole model that stay quantized: their number, and their bytes in memory."""

    parameters: int = 0
    num_bytes: int = 0
    expert_parameters: int = 0
    """Those of the experts, included in ``parameters``."""
    expert_bytes: int = 0
    has_embedding: bool = False
    """Whether the embedding is among them."""


def kept_kind(choice: str, dtype: str, device: str, name: str = "quantized_weights") -> KeptKind:
    """Which of them stay quantized with a dtype on a type of device.

    Raises ConfigurationError if ``choice``, the value of ``name``, is unknown or can't be combined with the others.
    """
    if choice not in QUANTIZED_WEIGHTS:
        raise ConfigurationError(f"{name} {choice}: use one of {', '.join(QUANTIZED_WEIGHTS)}", field=name)
    if choice == "expand":
        return KeptKind.NONE
    if device != "cpu":
        return KeptKind.FLOAT8
    if dtype == "float16":
        raise ConfigurationError(
            f"{name} keep: a CPU computes with quantized weights in bfloat16 or float32, but the dtype is {dtype}; use "
            "expand, or change it",
            field=name,
        )
    return KeptKind.INTEGERS
