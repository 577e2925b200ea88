"""Detection of bfloat16 and tile instructions."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_runtime.cpu_features import BFLOAT16, TILES, VECTORS, WIDE_VECTORS, reports_any


@pytest.mark.parametrize(
    ("line", "native", "tiled"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 avx512_vbmi2", True, False),
        ("flags\t\t: fpu amx_bf16 amx_tile", True, True),
        ("Features\t: fp asimd bf16 i8mm", True, False),
        ("flags\t\t: fpu avx2 fma avx512f", False, False),
        ("model name\t: a processor with bf16 and amx_tile in its name", False, False),
        ("", False, False),
    ],
)
def test_cpu_features_follow_the_flags_of_the_kernel(line: str, native: bool, tiled: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\nbogomips\t: 1\n")
    assert reports_any(BFLOAT16, tmp_path / "cpuinfo") is native
    assert reports_any(TILES, tmp_path / "cpuinfo") is tiled


@pytest.mark.parametrize(
    ("flags", "has_any", "has_wide"),
    [("fpu avx2 fma avx512f", True, True), ("fpu avx2 fma", True, False), ("fpu avx", False, False)],
)
def test_vectors_are_those_that_multiply_and_add(flags: str, has_any: bool, has_wide: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
    assert reports_any(VECTORS, tmp_path / "cpuinfo") is has_any
    assert reports_any(WIDE_VECTORS, tmp_path / "cpuinfo") is has_wide


def test_without_cpuinfo_there_are_no_features(tmp_path: Path) -> None:
    assert reports_any(BFLOAT16, tmp_path / "missing") is False
