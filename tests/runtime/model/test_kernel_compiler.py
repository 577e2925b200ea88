"""Processes that find a kernel in numba's cache and those that do not execute the same code."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_runtime.model.kernels import kernel_compiler
from megatron_runtime.model.kernels.compile_kernels import CACHE_VARIABLE
from megatron_runtime.model.kernels.recording import Kernel

SUPPORT = Path(__file__).parent.parent
PRINT_BITS = """
import hashlib, logging, numpy, sys
from megatron_runtime.model.kernels.compiled import even_shares
from runtime_support.softmax_kernel import WIDTH, softmax_kernel

logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
queries, keys = numpy.random.default_rng(0).normal(size=(2, 200, WIDTH)).astype(numpy.float32)
seen = numpy.zeros_like(queries)
softmax_kernel()(queries, keys, seen, even_shares(len(queries)))
assert numpy.isfinite(seen).all() and seen.any()
print(hashlib.sha256(seen.tobytes()).hexdigest())
"""

COUNT_THREADS = """
import time, torch
from megatron_runtime.model.kernels import row_kernels

rows, weight, shares = torch.ones(4096, 4096), torch.ones(4096), row_kernels.even_shares(4096)
places = [row_kernels.address(each) for each in (rows, rows, weight)]
for parallel in (False, True):
    kernel = row_kernels._rms_norm_kernel(False, parallel)
    every, own = time.process_time(), time.thread_time()
    for _ in range(40):
        kernel(*places, 4096, shares, 1e-5)
    print(round((time.process_time() - every) / (time.thread_time() - own)))
"""


def run(program: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """With two threads."""
    path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, CACHE_VARIABLE: str(cache), "OMP_NUM_THREADS": "2", "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)


def test_a_process_that_compiles_a_kernel_has_the_bits_of_one_that_loads_it(tmp_path: Path) -> None:
    """Numba's own code for them differs in the last digits on some processors, among them those with AMX."""
    compiled = run(PRINT_BITS, tmp_path)
    assert compiled.stderr == ""
    kernels = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")}
    assert kernels
    loaded = run(PRINT_BITS, tmp_path)
    assert loaded.stdout == compiled.stdout
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")} == kernels


def test_the_cache_keeps_a_kernel_for_one_thread_and_one_for_several(tmp_path: Path) -> None:
    """The threads of each, by their CPU time."""
    assert run(COUNT_THREADS, tmp_path).stdout.split() == ["1", "2"]


def test_a_kernel_is_compiled_here_if_no_other_process_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> Kernel:
        with kernel_compiler.from_cache_only(print):
            if not kernel_compiler._compiles_here:
                raise kernel_compiler._NotCachedError
            return print

    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with caplog.at_level(logging.WARNING):
        assert kernel_compiler.kernel_factory(load)() is print
    assert not kernel_compiler._compiles_here
    assert "no process could compile load" in caplog.text
    assert "this process compiles it" in caplog.text
