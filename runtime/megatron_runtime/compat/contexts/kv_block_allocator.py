"""Megatron's path of the allocator of KV blocks."""

from __future__ import annotations

from megatron_runtime.engine.scheduling.block_allocator import BlockAllocator as KVBlockAllocator

__all__ = ["KVBlockAllocator"]
