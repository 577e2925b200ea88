"""Arrays of the host on a device, and tensors of a device on the host, each by one copy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16
"""Bytes; kernels load from addresses that are multiples of it."""


def on_device(arrays: Mapping[str, NDArray[np.generic]], device: torch.device) -> dict[str, Tensor]:
    """The arrays as tensors on ``device``; on a CPU they share the memory.

    A GPU gets all of them by one copy from pinned memory, for which the host does not wait. The buffer is new each
    time: PyTorch reuses the memory of one only after the copy from it has ended.
    """
    if device.type == "cpu":
        return {name: torch.from_numpy(values) for name, values in arrays.items()}
    packed, starts = pack(arrays, pin_memory=True)
    copied = packed.to(device, non_blocking=True)
    return {
        name: copied[start : start + values.nbytes].view(torch.from_numpy(values[:0]).dtype).view(values.shape)
        for start, (name, values) in zip(starts, arrays.items(), strict=True)
    }


def pack(arrays: Mapping[str, NDArray[np.generic]], *, pin_memory: bool) -> tuple[Tensor, list[int]]:
    """The bytes of the arrays in one tensor of the host, and where each of them begins."""
    starts, size = [], 0
    for values in arrays.values():
        starts.append(size)
        size += -(-values.nbytes // _ALIGNMENT) * _ALIGNMENT
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory)
    target = packed.numpy()
    for start, values in zip(starts, arrays.values(), strict=True):
        target[start : start + values.nbytes] = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    return packed, starts


def on_host(*tensors: Tensor) -> list[Tensor]:
    """The tensors on the host. Of a GPU, all of them come by one copy, for which the host waits once.

    Args:
        tensors: Of one device, those with larger elements first.
    """
    if tensors[0].device.type == "cpu":
        return list(tensors)
    packed = torch.cat([each.contiguous().view(-1).view(torch.uint8) for each in tensors]).cpu()
    sizes = [each.numel() * each.element_size() for each in tensors]
    return [
        part.view(each.dtype).view(each.shape) for part, each in zip(torch.split(packed, sizes), tensors, strict=True)
    ]
