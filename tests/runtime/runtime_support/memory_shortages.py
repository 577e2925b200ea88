"""Errors of libraries that find too little memory on a GPU."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
from torch.distributed import DistBackendError

DEVICE_ERROR: type[Exception] = getattr(torch, "AcceleratorError", RuntimeError)


class Shortage(NamedTuple):
    """An error, and what a message has of its words."""

    kind: type[Exception]
    words: str
    cause: str

    def fail(self, *_: object, **__: object) -> NoReturn:
        """Raise it, in the place of any function."""
        raise self.kind(self.words)


ALLOCATOR = Shortage(
    torch.OutOfMemoryError,
    "CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 80.00 GiB",
    "CUDA out of memory",
)
CUDA = Shortage(
    DEVICE_ERROR,
    "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/ for more. CUDA\n"
    "kernel errors might be reported later. Consider passing CUDA_LAUNCH_BLOCKING=1",
    "CUDA error: out of memory",
)
CUBLAS = Shortage(
    RuntimeError,
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
)
TRITON = Shortage(RuntimeError, "Triton Error [CUDA]: out of memory", "Triton Error [CUDA]: out of memory")
NCCL = Shortage(
    DistBackendError,
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.27.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    "Cuda failure 2 'out of memory'",
)
SHORTAGES = {"allocator": ALLOCATOR, "cuda": CUDA, "cublas": CUBLAS, "triton": TRITON, "nccl": NCCL}
