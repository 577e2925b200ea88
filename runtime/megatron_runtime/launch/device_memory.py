"""The size of this pod's GPUs, found without torch."""

from __future__ import annotations

import logging

from megatron_runtime import nvidia_smi
from megatron_runtime.launch.memory import AvailableMemory
from megatron_runtime.launch.options import EngineOptions

logger = logging.getLogger(__name__)


def device_memory(engine: EngineOptions) -> AvailableMemory | None:
    """The size of the smallest GPU that a rank may get: as given, or from nvidia-smi; None if neither has it."""
    if engine.device == "cpu":
        return None
    if engine.device_memory_bytes is not None:
        return AvailableMemory(engine.device_memory_bytes, "as given by --device-memory")
    try:
        return AvailableMemory(min(total for (total,) in nvidia_smi.gpu_memory("total")), "as nvidia-smi reports")
    except nvidia_smi.FAILURES as error:
        logger.warning("the memory of the GPUs is unknown before the ranks start: %s", error)
        return None
