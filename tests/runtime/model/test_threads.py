"""Compiled kernels and PyTorch use the same threads, and the number that the user sets."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest


@pytest.mark.parametrize("by", ["a call", "the environment"])
@pytest.mark.parametrize("wanted", [1, 2])
def test_a_kernel_uses_the_threads_of_torch_and_keeps_their_number(wanted: int, by: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if by == "the environment":
        environment["OMP_NUM_THREADS"] = str(wanted)
    script = f"""
        import os, threading, torch
        {f"torch.set_num_threads({wanted})" if by == "a call" else ""}
        matrix = torch.ones(600, 600)
        matrix @ matrix
        before = len(os.listdir("/proc/self/task"))
        from megatron_runtime.model.cache_layout import CacheLayout
        from megatron_runtime.model.kernels import cpu_attention
        from megatron_runtime.model.kernels.row_kernels import WORTH_SHARING, rms_norm
        from megatron_runtime.model.kernels.threads import kernel_threads
        cpu_attention.prepare(CacheLayout(1, 1, 64, 64), torch.float32)
        assert torch.get_num_threads() == {wanted}
        rows = torch.ones(WORTH_SHARING // 512, 512)
        assert (rms_norm(rows, torch.ones(512), 0.0) == 1).all()
        print(kernel_threads(), torch.get_num_threads(), len(os.listdir("/proc/self/task")) - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout.split() == [str(wanted), str(wanted), "0"], done.stderr
