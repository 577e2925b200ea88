"""The kernels of matrices and caches in fp8 compile for GPUs that are not at hand, and fit their registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
MOST_SHARED = {90: 227 << 10, 100: 227 << 10}
LEAST_SHARED = 99 << 10
"""Bytes of shared memory that a program can have, by compute capability, and on other GPUs."""
MOST_SPILLED = {
    "sm_120 attend_splits 128 plain fp8": 8,
    "sm_90 attend_tiles 256 limited fp8": 80,
    "sm_100 attend_tiles 256 limited fp8": 24,
}
"""Bytes of local memory; 0 for others. The tiles of wide heads spill without fp8 too."""
FIRST_NATIVE = 90


def test_no_kernel_spills_registers_and_newer_processors_convert_the_numbers(triton_cache: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(HERE), environment.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, HERE / "gpu_support" / "compile_float8.py"],
        env=environment | {"TRITON_CACHE_DIR": str(triton_cache), "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name.split()[0] for name in found} == {f"sm_{each}" for each in (80, 86, 90, 100, 120)}
    for name, needed in found.items():
        capability = int(name.split()[0].removeprefix("sm_"))
        assert needed["spilled"] <= MOST_SPILLED.get(name, 0), (name, needed)
        assert needed["registers"] <= 255, (name, needed)
        assert needed["shared"] <= MOST_SHARED.get(capability, LEAST_SHARED), (name, needed)
        converts = capability >= FIRST_NATIVE and "store" not in name
        assert (needed["conversions"] > 0) == converts, (name, needed)
