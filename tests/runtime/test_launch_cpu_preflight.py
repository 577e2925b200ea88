"""What the launcher reserves of a CPU's memory for the processes and passes of a rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from runtime_support.small_facts import PLENTY, SMALL_FACTS

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.launch.memory import AvailableMemory
from megatron_runtime.launch.options import EngineOptions, LaunchOptions, ModelSource
from megatron_runtime.launch.preflight import RANK_OVERHEAD, EnginePlan, plan_engine

FACTS = replace(SMALL_FACTS, activation_elements=10_000, vocabulary=100_000)


def plan(max_requests: int | None, available: AvailableMemory = PLENTY) -> EnginePlan:
    engine = EngineOptions(dtype="float32", max_requests=max_requests)
    return plan_engine(LaunchOptions(model=ModelSource(path=Path("/m")), engine=engine), FACTS, available)


def test_the_reserve_of_a_cpu_rank_has_activations_and_logits() -> None:
    usual, fewer = plan(256), plan(8)
    activations = int(1.5 * (1024 + 1024) * 10_000 * 4)
    assert usual.reserve_bytes == RANK_OVERHEAD + activations + 4 * (256 * 4 * 100_000 + 32 * 2**20)
    assert usual.reserve_bytes - fewer.reserve_bytes == 4 * 248 * 4 * 100_000
    room = AvailableMemory(usual.reserve_bytes, "left of the container's limit")
    with pytest.raises(ConfigurationError, match=r"--model .*a rank needs about .* a lower --max-requests"):
        plan(None, room)
    assert plan(8, room).kv_cache_bytes
