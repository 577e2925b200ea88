"""Fixtures that more than one half of the tests need."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))  # suite_support lies here, and importlib mode puts nothing on the path

# A machine may stand still for a while, which is no fault of the code. And a test that fails should have passed before
# the change: whoever wants other examples every time says --hypothesis-profile=explore.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("explore"), derandomize=True)
settings.load_profile("repeatable")


def cache_folder() -> Path:
    """Where downloads and builds are kept between runs, outside the repository."""
    if chosen := os.environ.get("MEGATRON_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-inference"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as GGUF (Q4_1); fails, never skips, when it was not fetched."""
    path = cache_folder() / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        pytest.fail(f"{path} is missing: run `make model` once to fetch it")
    return path
