"""The products with matrices in fp8 compile for GPUs that are not at hand, and fit their registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
MOST_SHARED = 99 << 10
"""That of the GPUs with the least."""
FIRST_NATIVE = 90


def test_no_product_spills_registers_and_newer_processors_convert_the_numbers(triton_cache: Path) -> None:
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
        assert needed["spilled"] == 0, (name, needed)
        assert needed["registers"] <= 255, (name, needed)
        assert needed["shared"] <= MOST_SHARED, (name, needed)
        capability = int(name.split()[0].removeprefix("sm_"))
        assert (needed["conversions"] > 0) == (capability >= FIRST_NATIVE), (name, needed)
