"""When a compiled kernel is used: for the same sources, at any path."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest
from numba.core import caching, config

from megatron_runtime.model.kernels import kernel_cache
from megatron_runtime.model.kernels.kernel_cache import PACKAGE, KernelLocator, source_digest
from megatron_runtime.model.kernels.row_kernels import rms_norm

SOURCES = {
    "kernels/__init__.py": "",
    "kernels/products.py": "from package.kernels import sums\nfrom package.kernels.codes import (\n    BITS,\n)\n",
    "kernels/sums.py": "import math\n",
    "kernels/codes.py": "from package.formats import *\nBITS = 4\n",
    "formats/__init__.py": "from package.kernels.products import nothing\n",
    "kernels/other.py": "",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package whose modules import each other in all ways."""
    for name, source in SOURCES.items():
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return tmp_path / "package"


def digest(package: Path) -> str:
    source_digest.cache_clear()
    return source_digest(package / "kernels/products.py", package)


@pytest.mark.parametrize("changed", [name for name in SOURCES if name != "kernels/other.py"])
def test_a_change_of_a_module_or_of_one_that_it_imports_changes_the_digest(package: Path, changed: str) -> None:
    before = digest(package)
    (package / changed).write_text(SOURCES[changed] + "# changed\n")
    assert digest(package) != before


def test_neither_the_path_nor_other_modules_change_the_digest(package: Path, tmp_path: Path) -> None:
    before = digest(package)
    (package / "kernels/other.py").write_text("changed = True\n")
    moved = shutil.move(package, tmp_path / "elsewhere/package")
    assert digest(Path(moved)) == before


def test_the_pattern_finds_the_imports_of_the_syntax_trees() -> None:
    for path in PACKAGE.rglob("*.py"):
        imports = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom))
        names = {
            name
            for each in imports
            if (each.module or "").startswith(PACKAGE.name)
            for name in (each.module, *(f"{each.module}.{alias.name}" for alias in each.names))
        }
        places = {PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py") for name in names}
        found = {each for each in kernel_cache._imported(path.read_bytes(), PACKAGE) if each.name != "__init__.py"}
        assert {each for each in found if each.is_file()} == {each for each in places if each.is_file()}, path


def test_numba_finds_kernels_by_the_digest_of_their_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [caching.InTreeCacheLocator])
    kernel_cache.use_kernel_locator()
    kernel_cache.use_kernel_locator()
    found = caching.CompileResultCacheImpl(rms_norm).locator
    file = PACKAGE / "model/kernels/row_kernels.py"
    assert isinstance(found, KernelLocator)
    assert found.get_source_stamp() == source_digest(file)
    assert Path(found.get_cache_path()) == tmp_path / f"row_kernels_{source_digest(file)[:32]}"
    assert len(caching.CompileResultCacheImpl._locator_classes) == 2


def test_functions_of_others_and_folders_without_write_access_are_left_to_numba(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(PACKAGE / "model/kernels/row_kernels.py")
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    assert KernelLocator.from_function(rms_norm, file) is not None
    assert KernelLocator.from_function(rms_norm, shutil.__file__) is None
    (tmp_path / "file").touch()
    for folder in (str(tmp_path / "file"), ""):
        monkeypatch.setattr(config, "CACHE_DIR", folder)
        assert KernelLocator.from_function(rms_norm, file) is None
