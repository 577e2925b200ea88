"""The kernels for GPUs are imported on GPUs only."""

from __future__ import annotations

import subprocess
import sys


def test_a_rank_on_a_cpu_imports_neither_the_kernels_for_gpus_nor_triton() -> None:
    script = (
        "import sys\n"
        "from megatron_runtime import rank\n"
        "rank._import_engine()\n"
        "from megatron_runtime.engine import largest_pass\n"
        "print([name for name in sys.modules if name.startswith(('triton', 'megatron_runtime.gpu'))])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
