"""Uses an arena by the installed cuda-bindings, over the driver of ``printing_driver.cpp``.

A process of its own, because the driver is loaded once: ``LD_LIBRARY_PATH=FOLDER python bindings_calls.py``.
"""

from __future__ import annotations

from unittest.mock import patch

import torch

from megatron_runtime.gpu.arena import PIECE, Arena
from megatron_runtime.gpu.driver_memory import DriverMemory, obstacle

DEVICE = torch.device("cuda:1")


def main() -> None:
    """Print what the device lacks, and the error of a third piece; the driver prints its calls."""
    with patch.multiple(torch.cuda, init=lambda: None, synchronize=lambda _: None):
        print(obstacle(DEVICE), flush=True)
        memory = DriverMemory(DEVICE)
        address = memory.reserve(memory.granularity)
        try:
            Arena(DEVICE, [PIECE + 1]).map()
        except torch.OutOfMemoryError as error:
            print(error, flush=True)
        memory.free_addresses(address, memory.granularity)


if __name__ == "__main__":
    main()
