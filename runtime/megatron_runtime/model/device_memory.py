"""Errors about the memory of a GPU, with the sizes and the remedy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megatron_runtime import nvidia_smi
from megatron_runtime.errors import ConfigurationError

GENERAL_REMEDY = (
    "use a smaller --dtype, a lower --kv-cache-memory or --max-requests, more ranks with --tensor-parallel or "
    "--pipeline-parallel, or a GPU with more memory"
)
_SHORTAGES = ("out of memory", "ALLOC_FAILED")
"""What CUDA, its driver, Triton and NCCL say; and the status of libraries such as cuBLAS."""


def format_gibibytes(count: int) -> str:
    """An amount of memory with three digits or more, like ``79.1 GiB`` or ``0.0123 GiB``."""
    return f"{count / 2**30:.3g} GiB"


def address_obstacle(device: torch.device) -> str | None:
    """Why memory of this device can't be released without its addresses; None if it can."""
    if device.type != "cuda":
        return f"the device is {device.type}, and not a GPU"
    from megatron_runtime.gpu.driver_memory import obstacle  # Not needed on other devices.

    return obstacle(device)


def is_device_shortage(error: BaseException) -> bool:
    """Whether an error says that a device has too little memory.

    PyTorch's allocator raises OutOfMemoryError. CUDA contexts and graphs, pinned memory, and libraries that allocate
    memory themselves raise other RuntimeErrors, which only their words tell apart. A lack of host memory is none.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SHORTAGES)


def describe_shortage(stage: str, device: torch.device, error: BaseException) -> str:
    """What ran out of memory, and how much of it is used."""
    lines = str(error).splitlines() or [type(error).__name__]
    line = next((each for each in lines if any(words in each for words in _SHORTAGES)), lines[0])
    return f"{device} ran out of memory {stage}{_describe_use(device)} ({line.split('. ')[0]})"


@contextlib.contextmanager
def naming_device_memory(stage: str, device: torch.device, *, remedy: str = GENERAL_REMEDY) -> Iterator[None]:
    """Turn a lack of memory in this block into a ConfigurationError: the same settings would fail again.

    Args:
        stage: Completes the sentence "the device ran out of memory ...".
        device: The device of the rank.
        remedy: What to do about it.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_device_shortage(error):
            raise
        raise ConfigurationError(
            f"--device {device.type}: {describe_shortage(stage, device, error)}; {remedy}", field="device"
        ) from error


def _describe_use(device: torch.device) -> str:
    if device.type != "cuda" or not torch.cuda.is_available():
        return ""
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # It needs a CUDA context, for which there may be no memory.
        return _describe_use_without_context(device)
    return _describe_used(total - free, total)


def _describe_use_without_context(device: torch.device) -> str:
    try:
        properties = torch.cuda.get_device_properties(device)
    except RuntimeError:
        return ""
    try:
        ((used, total),) = nvidia_smi.gpu_memory("used", "total", gpu=f"GPU-{properties.uuid}")
    except nvidia_smi.FAILURES:
        return f", it has {format_gibibytes(properties.total_memory)}"
    return _describe_used(used, total)


def _describe_used(used: int, total: int) -> str:
    return f", {format_gibibytes(used)} of {format_gibibytes(total)} are used"
