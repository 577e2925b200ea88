"""Features of this machine's CPU, read without torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Instructions for bfloat16 matrix products, by the kernel's names on x86 and Arm."""
TILES = frozenset({"amx_tile"})
"""Matrix products by tiles (Intel AMX)."""
BFLOAT16_TILES = frozenset({"amx_bf16"})
VECTORS = frozenset({"fma"})
"""Vectors of 256 bits on x86 that multiply and add at once; processors with AVX2 have them."""
WIDE_VECTORS = frozenset({"avx512f"})
"""Vectors of 512 bits on x86."""
BFLOAT16_VECTORS = frozenset({"avx512_bf16"})
"""Such vectors with dot products of bfloat16."""
_CPUINFO = Path("/proc/cpuinfo")


@cache
def has_bfloat16() -> bool:
    """Whether bfloat16 matrix products are faster than float32."""
    return reports_any(BFLOAT16, _CPUINFO)


@cache
def has_tiles() -> bool:
    """Whether bfloat16 or float16 matrix products may use tiles."""
    return reports_any(TILES, _CPUINFO)


@cache
def has_bfloat16_tiles() -> bool:
    """Whether tiles multiply bfloat16."""
    return reports_any(BFLOAT16_TILES, _CPUINFO)


@cache
def has_vectors() -> bool:
    """Whether vectors of at least 256 bits multiply and add float32 at once."""
    return reports_any(VECTORS, _CPUINFO)


@cache
def has_wide_vectors() -> bool:
    """Whether vectors have 512 bits."""
    return reports_any(WIDE_VECTORS, _CPUINFO)


@cache
def has_bfloat16_vectors() -> bool:
    """Whether such vectors multiply bfloat16."""
    return reports_any(BFLOAT16_VECTORS, _CPUINFO)


def reports_any(features: frozenset[str], cpuinfo: Path) -> bool:
    """Whether a file in the format of /proc/cpuinfo lists any of these features; False if the file can't be read."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return any(
        name.strip() in {"flags", "Features"} and features & set(values.split())
        for name, _, values in (line.partition(":") for line in lines)
    )
