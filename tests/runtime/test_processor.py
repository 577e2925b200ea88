"""Which processors compute in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_runtime.processor import reports_bfloat16


@pytest.mark.parametrize(
    ("line", "native"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 avx512_vbmi2", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("flags\t\t: fpu avx2 fma avx512f", False),
        ("model name\t: a processor with bf16 in its name", False),
        ("", False),
    ],
)
def test_the_kernels_flags_tell(line: str, native: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\nbogomips\t: 1\n")
    assert reports_bfloat16(tmp_path / "cpuinfo") is native


def test_where_no_file_tells_there_is_none(tmp_path: Path) -> None:
    assert reports_bfloat16(tmp_path / "missing") is False
