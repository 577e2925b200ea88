"""The kernels compile for GPUs that are not at hand, and fit their registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_support import compile_ahead, compile_float8
from gpu_support.kernel_launches import launched_kernels

PROGRAM = Path(__file__).parent / "gpu_support" / "compile_ahead.py"
MOST_REGISTERS = {
    **dict.fromkeys(("attend_latent_tiles", "attend_latent_splits", "absorb_and_store", "merge_and_expand"), 255),
    **dict.fromkeys(("attend_tiles", "attend_splits", "collect_candidates"), 255),
    **dict.fromkeys(("sort_visits", "widen_visits", "narrow_visits"), 255),
    **dict.fromkeys(("find_floors", "truncate_rows", "race_tokens"), 128),
}
"""By kernel: with 128, a program of 16 warps fits the registers of a processor, and with 255, one of 8 warps."""
MOST_REGISTERS_OF_OTHERS = 64
MOST_SPILLED = {
    "turn_positions": 32,
    "attend_tiles 256": 64,
    "attend_tiles 128 capped": 40,
    "attend_tiles 128 plain fp32": 440,
    "attend_splits 128 plain fp32": 8,
}
"""Bytes of local memory by kernel; 0 for others. Cosines of angles above 1e5 are reduced with a small array there, and
tiles of wide heads that fit the registers were slower on an H200. The tile of width 128 fills the registers of Hopper
already without a soft cap. Exact products in float32 use no tensor cores, so no speed was measured to choose others."""
MOST_SHARED = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that a program can have, by compute capability."""


@pytest.mark.timeout(900)
def test_no_kernel_spills_registers_or_exceeds_the_shared_memory(triton_cache: Path) -> None:
    """Ampere, Hopper and Blackwell, of data centers and others, at the sizes of 8B models in bfloat16. Says nothing of
    speed or of races."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, PROGRAM],
        env=environment | {"TRITON_CACHE_DIR": str(triton_cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name.split()[0] for name in found} == {f"sm_{each}" for each in MOST_SHARED}
    for name, needed in found.items():
        capability, kernel = int(name.split()[0].removeprefix("sm_")), name.split()[1]
        most_spilled = next((most for start, most in MOST_SPILLED.items() if f" {start}" in name), 0)
        assert needed["spilled"] <= most_spilled, (name, needed)
        assert needed["registers"] <= MOST_REGISTERS.get(kernel, MOST_REGISTERS_OF_OTHERS), (name, needed)
        assert needed["shared"] <= MOST_SHARED[capability], (name, needed)


def test_every_kernel_that_is_launched_is_compiled_ahead() -> None:
    launched = launched_kernels()
    for capability in compile_ahead.CAPABILITIES:
        cases = (*compile_ahead.cases(capability), *compile_float8.cases(capability))
        assert {kernel.fn.__name__ for _, kernel, *_ in cases} == launched
