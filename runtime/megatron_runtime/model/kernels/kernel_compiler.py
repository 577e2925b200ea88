"""Compiles each kernel in a process of its own, so that all processes execute the code of numba's cache.

Numba optimizes the body of a parallel loop once for the process that compiles it, and once more in the module that it
caches. The order of sums, and so the last digits of results, can differ between the two.
"""

from __future__ import annotations

import base64
import logging
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from importlib import import_module
from typing import Any

from numba.core import event

from megatron_runtime.model.kernels.recording import Kernel, noted

logger = logging.getLogger(__name__)

Factory = Callable[..., Kernel]

_MODULE = "megatron_runtime.model.kernels.kernel_compiler"
_TIMEOUT_SECONDS = 600
_lock = threading.RLock()
_compiles_here = False


class _NotCachedError(Exception):
    """Numba's cache does not have the kernel. Not a RuntimeError, which numba raises without a cache folder."""


class _Refusal(event.Listener):
    """Ends the compilation of one function when it begins."""

    def __init__(self, function: Kernel) -> None:
        self._function = function

    def on_start(self, event: Any) -> None:
        """Raise _NotCachedError if the function is compiled."""
        if event.data["dispatcher"].py_func is self._function:
            raise _NotCachedError

    def on_end(self, event: Any) -> None:
        """Do nothing."""


def compile_in_this_process() -> None:
    """For processes that fill the cache and call no kernel."""
    global _compiles_here
    _compiles_here = True


@contextmanager
def from_cache_only(function: Kernel) -> Iterator[None]:
    """Numba loads the compiled function from its cache, or raises _NotCachedError, which `kernel_factory` handles."""
    with _lock:
        if _compiles_here:
            yield
            return
        with event.install_listener("numba:compile", _Refusal(function)):
            yield


def kernel_factory(factory: Factory) -> Factory:
    """For functions of a module that return a kernel of `compile_kernel`.

    They get positional arguments that can be pickled and hashed. Equal arguments return the same kernel. A process
    compiles the kernel itself if the cache can't keep it.
    """

    @cache
    def compiled(*args: Hashable) -> Kernel:
        try:
            return factory(*args)
        except _NotCachedError:
            _compile_in_other_process(factory.__module__, factory.__name__, args)
        try:
            return factory(*args)
        except _NotCachedError:
            logger.warning("numba's cache has no kernel of %s; this process compiles it", factory.__name__)
            return _compiled_here(factory, *args)

    @wraps(factory)
    def kernel(*args: Hashable) -> Kernel:
        return noted(compiled(*args))

    return kernel


def _compiled_here(factory: Factory, *args: Hashable) -> Kernel:
    global _compiles_here
    with _lock:
        _compiles_here = True
        try:
            return factory(*args)
        finally:
            _compiles_here = False


def _compile_in_other_process(module: str, name: str, args: tuple[Hashable, ...]) -> None:
    kernel = base64.b64encode(pickle.dumps((module, name, args))).decode()
    try:
        subprocess.run(
            [sys.executable, "-m", _MODULE, kernel],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_SECONDS,
        )
    except subprocess.CalledProcessError as failure:
        logger.warning("the process that compiles %s ended with %d: %s", name, failure.returncode, failure.stderr)
    except (OSError, subprocess.TimeoutExpired) as failure:
        logger.warning("no process could compile %s: %s", name, failure)


def main() -> None:
    """Compile the kernel that the argument names."""
    module, name, args = pickle.loads(base64.b64decode(sys.argv[1]))  # from the process that started this one
    import_module(_MODULE).compile_in_this_process()  # not of __main__, which the kernel's module does not use
    getattr(import_module(module), name)(*args)


if __name__ == "__main__":
    main()
