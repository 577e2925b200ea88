"""The threads of our own kernels and of PyTorch are the same, and as many as the user wants."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


@pytest.mark.parametrize("wanted", [1, 2])
def test_a_kernel_takes_the_operators_threads_and_leaves_their_number(wanted: int) -> None:
    script = f"""
        import os, threading, torch
        torch.set_num_threads({wanted})
        matrix = torch.ones(600, 600)
        matrix @ matrix
        before = len(os.listdir("/proc/self/task"))
        from megatron_runtime.model.cpu_attention import prepare
        from megatron_runtime.model.attention_kernels import attention_kernel
        from megatron_runtime.model.threads import kernel_threads
        import numpy as np
        threads = kernel_threads()
        rows, pool = np.ones((64, 2, 8), np.float32), np.ones((1, 2, 64, 8), np.float32)
        tiles = np.array([[0, row, row, 1] for row in range(64)], np.int32)
        bounds = np.arange(threads + 1) * 128 // threads
        seen = np.zeros_like(rows)
        attention_kernel(8, False)(rows, seen, pool, pool, np.zeros((1, 1), np.int32), tiles, bounds, 1 << 40, 0.0)
        assert (seen == 1).all()
        print(threads, torch.get_num_threads(), len(os.listdir("/proc/self/task")) - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.split() == [str(wanted), str(wanted), "0"], done.stderr
