"""Megatron's older path of the allocator of KV blocks."""

from __future__ import annotations

from megatron_runtime.engine.scheduling.block_allocator import BlockAllocator

__all__ = ["BlockAllocator"]
