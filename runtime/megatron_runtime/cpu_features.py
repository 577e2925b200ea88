"""Features of this machine's CPU, read without torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Matrices of bfloat16 are multiplied by instructions of their own. The kernel's names, on x86 and on Arm."""
TILES = frozenset({"amx_tile"})
"""Matrices of narrow numbers are multiplied tile by tile (Intel's AMX)."""
_CPUINFO = Path("/proc/cpuinfo")


@cache
def has_bfloat16() -> bool:
    """Whether products of bfloat16 are faster than those of float32."""
    return reports_any(BFLOAT16, _CPUINFO)


@cache
def has_tiles() -> bool:
    """Whether products of bfloat16 or float16 may be made of tiles."""
    return reports_any(TILES, _CPUINFO)


def reports_any(features: frozenset[str], cpuinfo: Path) -> bool:
    """Whether a file in the format of /proc/cpuinfo names any of them; False where there is no such file."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return any(
        name.strip() in {"flags", "Features"} and features & set(values.split())
        for name, _, values in (line.partition(":") for line in lines)
    )
