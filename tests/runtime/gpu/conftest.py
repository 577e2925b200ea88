"""Kernels run in Triton's interpreter here, on CPU tensors; without Triton these tests are skipped.

``tests/conftest.py`` selects the interpreter.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from gpu_support.pretended import PretendedDevice

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))  # for gpu_support; pytest's importlib mode does not add it


class SkippedModule(pytest.Module):
    """A file whose imports need Triton."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        """Skips the file."""
        pytest.skip("Triton is not installed; make dev installs it", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip the files of this folder without Triton."""
    if importlib.util.find_spec("triton") is not None or module_path.parent != HERE:
        return None
    made: pytest.Module = SkippedModule.from_parent(parent, path=module_path)
    return made


@pytest.fixture(autouse=True)
def interpreted_on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tile sizes of a GPU of compute capability 9.0; integers may overflow, as they do in a hash."""
    torch.set_num_threads(1)
    monkeypatch.setattr("megatron_runtime.gpu.launch._capability", lambda _: 90)
    with np.errstate(over="ignore"):
        yield


@pytest.fixture(autouse=True)
def quick_interpretation() -> Iterator[None]:
    """Without what the interpreter does several times, or in vain."""
    from gpu_support.quick_interpreter import quick_interpreter

    with quick_interpreter():
        yield


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact products of matrices: those of numpy depend on the place of a row, which says nothing of a GPU."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def exact(builder: object, a: Any, b: Any, d: Any, *_: object) -> TensorHandle:
        del builder
        product = a.data.astype(np.float64) @ b.data.astype(np.float64)
        return TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", exact)


@pytest.fixture(scope="session")
def device_guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the pretended device's part in C++; skips the tests that use it without a compiler."""
    from gpu_support.device_guard import load_device_guard

    folder = tmp_path_factory.mktemp("guard")
    try:
        load_device_guard(folder)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the pretended device needs a C++ compiler: {error}")
    return folder


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program for machines with a GPU, as a module."""
    monkeypatch.syspath_prepend(str(HERE.parents[2] / "benchmarks"))
    return importlib.import_module("gpu")


@pytest.fixture
def one_pass_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass begins before the tokens of the last one are known, so that a step has the work of one pass."""
    monkeypatch.setattr("megatron_runtime.engine.next_pass.NextPass.begin", lambda _: None)


@pytest.fixture
def device() -> Iterator[PretendedDevice]:
    """The pretended device."""
    from gpu_support.pretended import pretended_device

    with pretended_device() as device:
        yield device


@pytest.fixture
def without_cuda_bindings(device: PretendedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pretended device without the functions of the driver, so that a suspension moves memory."""
    del device

    def missing() -> None:
        raise ModuleNotFoundError("No module named 'cuda'")

    monkeypatch.setattr("megatron_runtime.gpu.driver_memory.import_driver", missing)


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short contexts have several, and long ones longer splits."""
    monkeypatch.setattr("megatron_runtime.gpu.attention.SPLIT", 32)
    monkeypatch.setattr("megatron_runtime.gpu.attention.MOST_SPLITS", 2)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """New memory is NaN, so that a value which no kernel writes is found."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
