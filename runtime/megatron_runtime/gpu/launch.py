"""Starting a kernel, in one place for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], **constants: Any) -> None:
    """Start ``kernel`` on the current stream, with a program for each place of the grid; none for an empty grid."""
    if all(grid):
        kernel[grid](*arguments, **constants)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


def capability(tensor: Tensor) -> int:
    """The compute capability of the tensor's device, like 90 for 9.0."""
    return _capability(tensor.device.index or 0)


@cache
def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor
