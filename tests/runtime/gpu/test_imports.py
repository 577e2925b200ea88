"""When the kernels for GPUs are imported and used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_runtime.model.kernels import triton_support


def printed_by(script: str) -> str:
    """By another interpreter."""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


def test_a_rank_on_a_cpu_imports_neither_the_kernels_for_gpus_nor_triton() -> None:
    script = (
        "import sys\n"
        "from megatron_runtime import rank\n"
        "rank.preload()\n"
        "from megatron_runtime.engine import largest_pass\n"
        "print([name for name in sys.modules if name.startswith(('triton', 'megatron_runtime.gpu'))])\n"
    )
    assert printed_by(script) == "[]\n"


def test_the_imports_of_a_rank_do_not_call_cuda() -> None:
    """A process that has initialized the driver can't fork processes that use it."""
    script = (
        "import torch\n"
        "called = []\n"
        "for module, names in (\n"
        "    (torch.cuda, ('is_available', 'device_count', 'current_device', 'get_device_properties', '_lazy_init')),\n"
        "    (torch._C, ('_cuda_getDeviceCount', '_cuda_init')),\n"
        "):\n"
        "    for name in names:\n"
        "        setattr(module, name, lambda *_, name=name: called.append(name))\n"
        "from megatron_runtime import rank\n"
        "rank.preload()\n"
        "imported = called[:]\n"
        "torch.cuda.is_available()\n"
        "print(imported, called)\n"
    )
    assert printed_by(script) == "[] ['is_available']\n"


def test_without_the_c_compiler_that_triton_needs_the_kernels_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    check = triton_support.has_triton.__wrapped__
    assert not check()
    assert "Triton needs a C compiler; install gcc, or set CC" in caplog.text
    monkeypatch.setenv("CC", "/usr/bin/cc")
    assert check()
