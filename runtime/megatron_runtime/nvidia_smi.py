"""The memory of GPUs as nvidia-smi reports it: without torch, and without a CUDA context."""

from __future__ import annotations

import subprocess

QUERY_SECONDS = 20
MEBIBYTE = 2**20
FAILURES = (OSError, ValueError, subprocess.SubprocessError)
"""Errors of `gpu_memory` where nvidia-smi is missing, does not answer, or has no GPU."""


def gpu_memory(*fields: str, gpu: str | None = None) -> list[list[int]]:
    """These fields of the memory of each GPU, or of one, in bytes. Raises FAILURES.

    Args:
        fields: "total" or "used".
        gpu: Number or UUID of the only one.
    """
    query = f"--query-gpu={','.join(f'memory.{field}' for field in fields)}"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", *([] if gpu is None else [f"--id={gpu}"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True)
    return [[int(each) * MEBIBYTE for each in line.split(",")] for line in done.stdout.splitlines()]
