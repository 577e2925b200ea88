"""Megatron's path of the engine's context, its errors, and their serialization."""

from __future__ import annotations

from megatron_runtime.compat._context_errors import ContextErrorFactory
from megatron_runtime.compat._sizes import size_text as get_mem_size_str
from megatron_runtime.engine.context import DynamicInferenceContext
from megatron_runtime.errors import (
    ActiveRequestCountOverflowError,
    BlockOverflowError,
    ContextOverflowError,
    MaxSequenceLengthOverflowError,
    RequestOverflowError,
    TensorStateDeallocatedError,
    TokenOverflowError,
)

__all__ = [
    "ActiveRequestCountOverflowError",
    "BlockOverflowError",
    "ContextErrorFactory",
    "ContextOverflowError",
    "DynamicInferenceContext",
    "MaxSequenceLengthOverflowError",
    "RequestOverflowError",
    "TensorStateDeallocatedError",
    "TokenOverflowError",
    "get_mem_size_str",
]
