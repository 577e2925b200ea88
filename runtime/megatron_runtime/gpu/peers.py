"""Other GPUs of this machine, and whether kernels of one GPU can work on the memory of another one."""

from __future__ import annotations

from typing import Any

import torch

from megatron_runtime.gpu.driver_memory import import_driver


def identity(device: torch.device) -> str:
    """What identifies a GPU in all processes of a machine."""
    return str(torch.cuda.get_device_properties(device).uuid)


def peer_obstacle(device: torch.device, peer: str) -> str | None:
    """Why kernels of this GPU can't read, write and atomically change the memory of another one; None if they can.

    Args:
        device: The GPU of this process, with its index.
        peer: The `identity` of the other one.
    """
    mine = device.index
    others = (index for index in range(torch.cuda.device_count()) if identity(torch.device("cuda", index)) == peer)
    if (other := next(others, None)) is None:
        return f"this process does not see the GPU {peer}"
    if not torch.cuda.can_device_access_peer(mine, other):
        return f"the GPU {mine} has no access to the memory of GPU {other}"
    try:
        driver = import_driver()
    except ImportError as error:
        return f"the package cuda-bindings is missing ({error})"
    if not _has_atomics(driver, mine, other):
        return f"the link between the GPUs {mine} and {other} has no atomic operations, as NVLink has"
    return None


def _has_atomics(driver: Any, mine: int, other: int) -> bool:
    supported = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    devices = []
    for index in (mine, other):
        result, found = driver.cuDeviceGet(index)
        if result != driver.CUresult.CUDA_SUCCESS:
            return False
        devices.append(found)
    result, value = driver.cuDeviceGetP2PAttribute(supported, *devices)
    return result == driver.CUresult.CUDA_SUCCESS and bool(value)
