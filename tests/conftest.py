"""Fixtures for several folders of tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
for folder in (HERE, HERE / "runtime"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # for suite_support and runtime_support; pytest's importlib mode does not add it

# Workers share the cores. Set before torch is imported, which reads it once.
if (workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

# For the tests of kernels for GPUs. Triton reads it when it is imported, which another library may do.
os.environ.setdefault("TRITON_INTERPRET", "1")

# No deadline, because a busy machine is no failure. Examples are the same in every run, so that a failure comes from
# the change; --hypothesis-profile=explore generates others.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("explore"), derandomize=True)
settings.load_profile("repeatable")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without garbage collection: nearly all objects stay, and full collections in the tests would scan them again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only with workers: a single process runs the tests in the given order."""
    if hasattr(config, "workerinput"):
        from suite_support.schedule import longest_first

        items[:] = longest_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A hook of pytest-xdist."""
    if config.getvalue("dist") != "loadfile":
        return None
    from suite_support.schedule import FileScheduling

    return FileScheduling(config, log)


CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{{ tools }}"
"""For a byte-level model."""


def cache_folder() -> Path:
    """The folder of downloads and builds, outside the repository."""
    if chosen := os.environ.get("MEGATRON_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-inference"


@pytest.fixture(scope="session")
def triton_cache() -> Path:
    """Triton's compiled kernels of earlier runs, which it finds by the hash of their source, target and options."""
    return cache_folder() / "triton"


@pytest.fixture(scope="session")
def kernels_folder() -> Path:
    """Numba's compiled kernels of earlier runs, which it finds by the hash of their sources; as in the Makefile."""
    return cache_folder() / "kernels"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as GGUF (Q4_1). Fails, instead of skipping, when it was not downloaded."""
    path = cache_folder() / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        pytest.fail(f"{path} is missing: run `make model` once to fetch it")
    return path


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights and a byte-level tokenizer, for tests that do not depend on words."""
    from runtime_support.tiny_checkpoint import write_tiny_checkpoint

    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), longest=8192, chat_template=CHAT_TEMPLATE)
