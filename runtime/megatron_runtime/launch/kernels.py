"""Kernels that were compiled ahead, for pods that begin with empty folders and may not write to their image."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Iterator, MutableMapping

from megatron_runtime.model.kernels.compile_kernels import CACHE_VARIABLE

logger = logging.getLogger(__name__)

KERNELS_VARIABLE = "MEGATRON_KERNELS"
"""Names a folder that ``megatron_runtime.model.kernels.compile_kernels`` has filled; it may be read-only."""


@contextlib.contextmanager
def kernel_cache(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Lets ranks that inherit ``environment`` begin with a copy of those kernels; it is removed at the end.

    Kernels for another processor, or of other sources, are compiled as if there were none. A cache that the environment
    names itself is left alone. A folder that can't be copied is a warning: ranks serve all the same, only later.
    """
    given = environment.get(KERNELS_VARIABLE)
    if not given or environment.get(CACHE_VARIABLE):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="megatron-kernels-", ignore_cleanup_errors=True) as folder:
        try:
            shutil.copytree(given, folder, dirs_exist_ok=True)
        except OSError as error:
            logger.warning("%s=%s: can't be copied (%s); kernels are compiled anew", KERNELS_VARIABLE, given, error)
        environment[CACHE_VARIABLE] = folder
        try:
            yield
        finally:
            del environment[CACHE_VARIABLE]
