"""Fixtures: a coordinator with whatever a test puts around it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from megatron_runtime.config import InferenceConfig
from megatron_runtime.model.checkpoint import load_model, load_tokenizer

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))  # messaging_support lies here, and importlib mode puts nothing on the path

from messaging_support.fleet import Fleet  # noqa: E402


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[Fleet]:
    """A coordinator in a thread, without engines and clients yet."""
    async with Fleet() as started:
        started.start_coordinator()
        yield started


@pytest.fixture(scope="module")
def smollm2_parts(smollm2_path: Path) -> dict[str, Any]:
    """What MegatronLLM is made of: SmolLM2's weights, the module's own, since tests put others in their place."""
    return _parts(smollm2_path)


@pytest.fixture(scope="module")
def tiny_parts(tiny_checkpoint: Path) -> dict[str, Any]:
    """The same of random weights, for what does not depend on words."""
    return _parts(tiny_checkpoint)


def _parts(checkpoint: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        "model": load_model(checkpoint, dtype="float32"),
        "tokenizer": load_tokenizer(checkpoint),
        "inference_config": InferenceConfig(kv_cache_memory_bytes=64 * 2**20),
    }
