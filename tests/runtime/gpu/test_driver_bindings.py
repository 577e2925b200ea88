"""What an arena asks of the installed cuda-bindings, which need no driver for it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_support.fake_driver import CUresult, FakeDriver

CALLS = """\
attribute 102 of 1
granularity 1 of 1 1/1
reserve 2097152 0 0 0
create 2097152 of 1 1/1, 0
map 7f0000000000 2097152 0 abc1 0
release abc1
access 7f0000000000 2097152 1 of 1/1, 3
unmap 7f0000000000 2097152
free 7f0000000000 2097152
None
granularity 1 of 1 1/1
reserve 2097152 0 0 0
granularity 1 of 1 1/1
reserve 69206016 0 0 0
create 67108864 of 1 1/1, 0
map 7f0000000000 67108864 0 abc2 0
release abc2
create 2097152 of 1 1/1, 0
create 2097152 of 1 1/1, 0
unmap 7f0000000000 67108864
cuMemCreate of 2097152 bytes: CUDA_ERROR_OUT_OF_MEMORY (out of memory)
free 7f0000000000 69206016
free 7f0000000000 2097152
"""
"""Device 1, memory of the type 1 (pinned) at locations of the type 1 (devices), and access 3 (to read and write)."""


def test_the_functions_of_the_driver_have_these_names_and_arguments() -> None:
    """Of the installed cuda-bindings: their documentation begins with the arguments."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    for name, fake in inspect.getmembers(FakeDriver, inspect.isfunction):
        if name.startswith("cu"):
            documented = getattr(driver, name).__doc__.split("\n")[0].partition("(")[2]
            assert len(documented.split(", ")) == len(inspect.signature(fake).parameters) - 1, name
    for name, names in vars(FakeDriver).items():
        if name.startswith("CU") and hasattr(names, "__dict__") and not callable(names):
            assert all(hasattr(getattr(driver, name), each) for each in vars(names)), name
    assert all(hasattr(driver.CUresult, each.name) for each in CUresult)


def test_the_bindings_pass_the_calls_on(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    here, library = Path(__file__).parent / "gpu_support", tmp_path / "libcuda.so.1"
    try:
        subprocess.run(["c++", "-shared", "-fPIC", here / "printing_driver.cpp", "-o", library, "-ldl"], check=True)
    except FileNotFoundError as error:
        pytest.skip(f"a driver of the tests needs a C++ compiler: {error}")
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, here / "bindings_calls.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout == CALLS
