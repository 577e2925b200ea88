"""The size of this pod's GPUs, found without torch."""

from __future__ import annotations

import logging
import subprocess

from megatron_runtime.launch.memory import AvailableMemory
from megatron_runtime.launch.options import EngineOptions

logger = logging.getLogger(__name__)

QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
QUERY_SECONDS = 20
MEBIBYTE = 2**20


def device_memory(engine: EngineOptions) -> AvailableMemory | None:
    """The size of the smallest GPU that a rank may get: as given, or from nvidia-smi; None if neither has it."""
    if engine.device == "cpu":
        return None
    if engine.device_memory_bytes is not None:
        return AvailableMemory(engine.device_memory_bytes, "as given by --device-memory")
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True)
        return AvailableMemory(min(int(line) for line in done.stdout.split()) * MEBIBYTE, "as nvidia-smi reports")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.warning("the memory of the GPUs is unknown before the ranks start: %s", error)
        return None
