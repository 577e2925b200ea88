"""What the processor of this machine can do, without torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_NATIVE = {"avx512_bf16", "amx_bf16", "bf16"}
"""The kernel's names, on x86 and on Arm."""


@cache
def has_bfloat16() -> bool:
    """Whether matrices of bfloat16 are multiplied by instructions of their own, and so faster than those of float32."""
    return reports_bfloat16(Path("/proc/cpuinfo"))


def reports_bfloat16(cpuinfo: Path) -> bool:
    """The same of any file in the format of /proc/cpuinfo; False where there is none."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return any(
        name.strip() in {"flags", "Features"} and _NATIVE & set(values.split())
        for name, _, values in (line.partition(":") for line in lines)
    )
