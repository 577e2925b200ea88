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

PRINT_BITS = """
import hashlib, logging, numpy, sys, torch
from megatron_runtime.model.kernels.attention_kernels import attention_kernel
from megatron_runtime.model.kernels.cpu_attention import even_shares

logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
random = numpy.random.default_rng(0)
tokens, heads, width = 200, 2, 64
rows = random.normal(size=(tokens, heads + 2, width)).astype(numpy.float32)
seen = numpy.zeros((tokens, heads, width), numpy.float32)
keys, values = numpy.zeros((2, 1, 1, tokens, width), numpy.float32)
tables, none = numpy.zeros((1, 1), numpy.int32), numpy.zeros(0, numpy.float32)
tiles = numpy.array([[0, 0, 0, tokens]], numpy.int32)
turns = numpy.zeros((tokens, 0), numpy.float32)
attend = attention_kernel(width, width, False, False)
attend(
    rows, seen, keys, values, numpy.arange(tokens), tables, tiles, even_shares(tokens), even_shares(1),
    1, turns, turns, 2**40, 0, none, 0.0,
)
assert numpy.isfinite(seen).all() and seen.any()
print(hashlib.sha256(seen.tobytes()).hexdigest())
"""


def bits(cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, CACHE_VARIABLE: str(cache), "OMP_NUM_THREADS": "2"}
    return subprocess.run(
        [sys.executable, "-c", PRINT_BITS], env=environment, check=True, capture_output=True, text=True
    )


def test_a_process_that_compiles_a_kernel_has_the_bits_of_one_that_loads_it(tmp_path: Path) -> None:
    """Numba's own code for them differs in the last digits on some processors, among them those with AMX."""
    compiled = bits(tmp_path)
    assert compiled.stderr == ""
    kernels = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")}
    assert kernels
    loaded = bits(tmp_path)
    assert loaded.stdout == compiled.stdout
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")} == kernels


def test_a_kernel_is_compiled_here_if_no_other_process_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> kernel_compiler.Kernel:
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
