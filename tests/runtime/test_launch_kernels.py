"""Precompiled kernels in a read-only folder."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from suite_support.console_runs import documented
from suite_support.doc_shell import DocShell

from megatron_runtime.launch.kernels import KERNELS_VARIABLE, kernel_cache
from megatron_runtime.model.kernels.compile_kernels import CACHE_VARIABLE
from megatron_runtime.model.kernels.kernel_cache import PACKAGE

COMPILE = "megatron_runtime.model.kernels.compile_kernels"
SIZES = ("--head-dim", "16", "--latent-dim", "8", "4", "--dtype", "float32", "--quantization", "Q8_0")


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def compiled_once(kernels_folder: Path) -> Path:
    """What COMPILE makes of these sources: of an earlier run, where there was one, since it takes half a minute."""
    sources = [*(PACKAGE / "model/kernels").glob("*.py"), PACKAGE / "model/formats/coded_rows.py"]
    made_of = repr((SIZES, sys.version, [each.read_text() for each in sorted(sources)]))
    folder = kernels_folder / f"shipped_{hashlib.sha256(made_of.encode()).hexdigest()[:32]}"
    subprocess.run([sys.executable, "-m", COMPILE, str(folder), *SIZES], check=True)
    return folder


def test_precompiled_kernels_are_used(kernels_folder: Path, tmp_path: Path) -> None:
    shipped = Path(shutil.copytree(compiled_once(kernels_folder), tmp_path / "shipped"))
    before = files_below(shipped)
    assert any("attend" in name for name in before)
    assert any("_product_kernel" in name for name in before)
    environment = {**os.environ, KERNELS_VARIABLE: str(shipped)}
    environment.pop(CACHE_VARIABLE, None)
    with kernel_cache(environment):
        copy = Path(environment[CACHE_VARIABLE])
        subprocess.run([sys.executable, "-m", COMPILE, str(copy), *SIZES], env=environment, check=True)
        assert files_below(copy) == before  # kernels that are compiled would be written
    assert not copy.exists()
    assert CACHE_VARIABLE not in environment
    assert files_below(shipped) == before


def test_the_command_of_the_docs_compiles_kernels(kernels_folder: Path, tmp_path: Path) -> None:
    """Into the folder of all tests, because others use some of these kernels, and to compile them takes long."""
    (step,) = documented("docs/operations.md", "python3 -m megatron_runtime")
    DocShell(tmp_path / "reader").run(step.command.replace("FOLDER", str(kernels_folder)))
    assert list(kernels_folder.glob("quantized_products_*/*_product_kernel*"))


def test_a_cache_folder_of_the_environment_is_not_replaced(tmp_path: Path) -> None:
    environment = {KERNELS_VARIABLE: str(tmp_path), CACHE_VARIABLE: "/own"}
    with kernel_cache(environment):
        assert environment[CACHE_VARIABLE] == "/own"
    assert environment[CACHE_VARIABLE] == "/own"


def test_a_missing_folder_of_kernels_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    environment = {KERNELS_VARIABLE: "/nowhere"}
    with caplog.at_level(logging.WARNING), kernel_cache(environment):
        assert Path(environment[CACHE_VARIABLE]).is_dir()
    assert "MEGATRON_KERNELS=/nowhere: can't be copied" in caplog.text
