"""Fixtures: a coordinator, and the models of engines."""

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
    sys.path.append(str(HERE))  # for messaging_support: importlib mode adds nothing to the path

from messaging_support.fleet import Fleet  # noqa: E402


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[Fleet]:
    """A coordinator in a thread, without engines and clients."""
    async with Fleet() as started:
        started.start_coordinator()
        yield started


@pytest.fixture(scope="module")
def smollm2_parts(smollm2_path: Path) -> dict[str, Any]:
    """The arguments of MegatronLLM: SmolLM2, loaded per module, since tests change its weights."""
    return _parts(smollm2_path)


@pytest.fixture(scope="module")
def tiny_parts(tiny_checkpoint: Path) -> dict[str, Any]:
    """The same with random weights, for tests that do not depend on the text."""
    return _parts(tiny_checkpoint)


def _parts(checkpoint: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        "model": load_model(checkpoint, dtype="float32"),
        "tokenizer": load_tokenizer(checkpoint),
        "inference_config": InferenceConfig(kv_cache_memory_bytes=64 * 2**20),
    }
