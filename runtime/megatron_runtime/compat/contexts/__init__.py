"""Megatron's path of contexts, and of the errors of requests that exceed them."""

from __future__ import annotations

from megatron_runtime.engine.context import DynamicInferenceContext
from megatron_runtime.engine.context import DynamicInferenceContext as BaseInferenceContext
from megatron_runtime.engine.scheduling.block_allocator import BlockAllocator
from megatron_runtime.engine.scheduling.block_allocator import BlockAllocator as KVBlockAllocator
from megatron_runtime.errors import (
    ActiveRequestCountOverflowError,
    BlockOverflowError,
    ContextOverflowError,
    RequestOverflowError,
    TokenOverflowError,
)

__all__ = [
    "ActiveRequestCountOverflowError",
    "BaseInferenceContext",
    "BlockAllocator",
    "BlockOverflowError",
    "ContextOverflowError",
    "DynamicInferenceContext",
    "KVBlockAllocator",
    "RequestOverflowError",
    "TokenOverflowError",
]
