"""Where numba keeps compiled kernels in the folder of ``NUMBA_CACHE_DIR``: by the content of their sources.

Numba alone finds them by the path of the package and the content of one file. It compiles functions of other files into
a kernel, and would execute an old kernel after a change of these; and another path of the same sources would compile
all kernels anew.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from numba.core import caching, config

PACKAGE = Path(__file__).parents[2]
_IMPORT = rb"^from (%s[\w.]*) import (\([^)]*\)|.*)"


@cache
def source_digest(file: Path, package: Path = PACKAGE) -> str:
    """Of a module of ``package`` and all modules of it that this one imports, also indirectly."""
    sources: dict[str, bytes] = {}
    todo = [file]
    while todo:
        path = todo.pop()
        name = path.relative_to(package).as_posix()
        if name not in sources:
            sources[name] = path.read_bytes()
            todo += [each for each in _imported(sources[name], package) if each.is_file()]
    return hashlib.sha256(repr(sorted(sources.items())).encode()).hexdigest()


def _imported(source: bytes, package: Path) -> Iterator[Path]:
    """Files that may be modules which this source imports.

    Found by a pattern: to parse the modules takes a fifth of a second, for every rank that starts. A text that looks
    like an import adds at most a module that a digest does not need.
    """
    for module, names in re.findall(_IMPORT % package.name.encode(), source, re.MULTILINE):
        place = package.parent.joinpath(*module.decode().split("."))
        yield from (place.with_suffix(".py"), place / "__init__.py")
        yield from (place / f"{name.decode()}.py" for name in re.findall(rb"\w+", names))


class KernelLocator(caching._CacheLocator):
    """Numba's interface for a place of compiled functions."""

    def __init__(self, function: Callable[..., Any], file: Path) -> None:
        self._digest = source_digest(file)
        self._line = function.__code__.co_firstlineno
        self._folder = Path(_chosen_folder()) / f"{file.stem}_{self._digest[:32]}"

    def get_cache_path(self) -> str:
        """The folder of this function."""
        return str(self._folder)

    def get_source_stamp(self) -> str:
        """What has to be equal for a compiled function to be used."""
        return self._digest

    def get_disambiguator(self) -> str:
        """For functions of the same name in one file."""
        return str(self._line)

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> KernelLocator | None:
        """None without ``NUMBA_CACHE_DIR``, without write access to it, and for functions of other packages."""
        if not _chosen_folder() or PACKAGE not in Path(py_file).parents:
            return None
        locator = cls(py_func, Path(py_file))
        try:
            locator.ensure_cache_path()  # type: ignore[no-untyped-call]
        except OSError:
            return None
        return locator


def _chosen_folder() -> str:
    return getattr(config, "CACHE_DIR", "")


def use_kernel_locator() -> None:
    """Have numba ask this locator before its own ones."""
    locators = caching.CompileResultCacheImpl._locator_classes
    if KernelLocator not in locators:
        locators.insert(0, KernelLocator)
