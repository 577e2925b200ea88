"""Ranges of settings that several configurations have."""

from __future__ import annotations

import math

from megatron_runtime.errors import ConfigurationError


def check_routing_alpha(alpha: float, origin: str | None = None) -> None:
    """Check the weight of a known prefix against the load.

    Args:
        origin: Flag and value for the message; None means the field of a configuration.

    Raises:
        ConfigurationError: Less than 0 or more than 1.
    """
    if not 0 <= alpha <= 1:
        name = "prefix_caching_routing_alpha"
        raise ConfigurationError(f"{origin or f'{name}={alpha!r}'} must be between 0 and 1", field=name)


def check_state_memory(ratio: float | None, snapshot_gb: float | None, *, are_flags: bool = False) -> None:
    """Check the ranges of ``mamba_memory_ratio`` and ``prefix_caching_mamba_gb``.

    Args:
        are_flags: Whether messages name flags of megatron-serve instead of fields.

    Raises:
        ConfigurationError: A value is no finite number, or out of range.
    """
    for name, value, least, limit, allowed in (
        ("mamba_memory_ratio", ratio, math.ulp(0.0), 1.0, "more than 0 and less than 1, or left out"),
        ("prefix_caching_mamba_gb", snapshot_gb, 0.0, math.inf, "a number of at least 0"),
    ):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and least <= value < limit):
            origin = f"--{name.replace('_', '-')} {value}:" if are_flags else f"{name}={value!r}"
            raise ConfigurationError(f"{origin} must be {allowed}", field=name)
