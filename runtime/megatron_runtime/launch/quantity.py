"""Kubernetes quantities of memory."""

from __future__ import annotations

import re

from megatron_runtime.errors import ConfigurationError

_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_UNITS = {"": 1, **_BINARY, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]i|[kMGTP])?")


def parse_bytes(text: str, flag: str) -> int:
    """``512Mi`` -> 536870912. Raises ConfigurationError naming ``flag``."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigurationError(f"{flag} {text}: not an amount of memory; use a quantity such as 512Mi or 20Gi")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def format_bytes(count: float) -> str:
    """1610612736 -> ``1.5Gi``."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if count >= _UNITS[unit]:
            return f"{count / _UNITS[unit]:.1f}".removesuffix(".0") + unit
    return f"{count:.0f}"
