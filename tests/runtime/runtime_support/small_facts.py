"""What the launcher knows of a small model, and a machine with plenty of memory."""

from __future__ import annotations

from megatron_runtime.launch.inspection import CheckpointFacts
from megatron_runtime.launch.memory import AvailableMemory
from megatron_runtime.model.cache_layout import CacheLayout

SMALL_FACTS = CheckpointFacts(
    path="/m",
    architecture="llama",
    parameters=1000,
    longest=512,
    layers=4,
    cache_layout=CacheLayout(num_layers=4, heads=2, key_width=16, value_width=16),
)
BYTES_PER_TOKEN = 2 * 4 * 2 * 16 * 4
"""Of its keys and values in float32."""
PLENTY = AvailableMemory(2**40, "free on this machine")
