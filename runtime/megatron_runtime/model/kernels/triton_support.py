"""Whether kernels for GPUs can be used."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from functools import cache

_logger = logging.getLogger(__name__)


@cache
def has_triton() -> bool:
    """Whether Triton is installed, which PyTorch's CUDA builds bring, and the C compiler that it uses at its first
    launch."""
    if importlib.util.find_spec("triton") is None:
        return False
    if os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"):
        return True
    _logger.warning(
        "the kernels for GPUs are replaced by slower ones of PyTorch: Triton needs a C compiler; install gcc, or set CC"
    )
    return False
