"""Errors about the memory of a GPU, with the sizes and the remedy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megatron_runtime.errors import ConfigurationError

_REMEDY = (
    "use a smaller --dtype, a lower --kv-cache-memory or --max-requests, more ranks with --tensor-parallel or "
    "--pipeline-parallel, or a GPU with more memory"
)


def format_gibibytes(count: int) -> str:
    """An amount of memory with three digits or more, like ``79.1 GiB`` or ``0.0123 GiB``."""
    return f"{count / 2**30:.3g} GiB"


def address_obstacle(device: torch.device) -> str | None:
    """Why memory of this device can't be released without its addresses; None if it can."""
    if device.type != "cuda":
        return f"the device is {device.type}, and not a GPU"
    from megatron_runtime.gpu.driver_memory import obstacle  # Not needed on other devices.

    return obstacle(device)


def describe_shortage(stage: str, device: torch.device, error: torch.OutOfMemoryError) -> str:
    """What ran out of memory, and how much of it is used."""
    used = ""
    if device.type == "cuda" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(device)
        used = f", {format_gibibytes(total - free)} of {format_gibibytes(total)} are used"
    first = str(error).split(". ")[0]
    return f"{device} ran out of memory {stage}{used} ({first})"


@contextlib.contextmanager
def naming_device_memory(stage: str, device: torch.device, *, remedy: str | None = None) -> Iterator[None]:
    """Turn a lack of memory in this block into a ConfigurationError: the same settings would fail again.

    Args:
        stage: Completes the sentence "the device ran out of memory ...".
        device: The device of the rank.
        remedy: A further one, which is named first.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        remedies = _REMEDY if remedy is None else f"{remedy}, or {_REMEDY}"
        raise ConfigurationError(
            f"--device {device.type}: {describe_shortage(stage, device, error)}; {remedies}", field="device"
        ) from error
