"""Precompiled kernels, for pods that start with empty folders and a read-only image."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Iterator, MutableMapping

from megatron_runtime.model.kernels.compile_kernels import CACHE_VARIABLE

logger = logging.getLogger(__name__)

KERNELS_VARIABLE = "MEGATRON_KERNELS"
"""Folder with the kernels that ``megatron_runtime.model.kernels.compile_kernels`` has compiled; may be read-only."""


@contextlib.contextmanager
def kernel_cache(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Gives ranks that inherit ``environment`` a copy of the precompiled kernels; removes it at the end.

    Kernels for another CPU or of another version are compiled anew. A cache folder that the environment already sets is
    used as it is. If the folder can't be copied, a warning is logged and the ranks compile the kernels, which takes
    longer.
    """
    given = environment.get(KERNELS_VARIABLE)
    if not given or environment.get(CACHE_VARIABLE):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="megatron-kernels-", ignore_cleanup_errors=True) as folder:
        try:
            shutil.copytree(given, folder, dirs_exist_ok=True)
        except OSError as error:
            logger.warning("%s=%s: can't be copied (%s); the ranks compile the kernels", KERNELS_VARIABLE, given, error)
        environment[CACHE_VARIABLE] = folder
        try:
            yield
        finally:
            del environment[CACHE_VARIABLE]
