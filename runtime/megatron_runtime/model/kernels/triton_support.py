"""Whether kernels for GPUs can be used."""

from __future__ import annotations

import importlib.util
from functools import cache


@cache
def has_triton() -> bool:
    """Whether Triton is installed, which PyTorch's CUDA builds bring."""
    return importlib.util.find_spec("triton") is not None
