"""What the launcher reserves of a CPU's memory for the processes and passes of a rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from runtime_support.small_facts import PLENTY, SMALL_FACTS

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.launch.memory import AvailableMemory
from megatron_runtime.launch.options import EngineOptions, LaunchOptions, ModelSource
from megatron_runtime.launch.preflight import RANK_OVERHEAD, plan_engine


def with_requests(options: LaunchOptions, count: int) -> LaunchOptions:
    """The options with this limit of requests in a pass."""
    return replace(options, engine=replace(options.engine, max_requests=count))


@pytest.fixture
def options(tmp_path: Path) -> LaunchOptions:
    """Valid options; the dtype does not depend on the machine."""
    return LaunchOptions(model=ModelSource(path=tmp_path), engine=EngineOptions(dtype="float32"))


def test_the_reserve_of_a_cpu_rank_has_activations_and_logits(options: LaunchOptions) -> None:
    facts = replace(SMALL_FACTS, activation_elements=10_000, vocabulary=100_000)
    usual, fewer = (plan_engine(with_requests(options, count), facts, PLENTY) for count in (256, 8))
    activations = int(1.5 * (1024 + 1024) * 10_000 * 4)
    assert usual.reserve_bytes == RANK_OVERHEAD + activations + 4 * (256 * 4 * 100_000 + 32 * 2**20)
    assert usual.reserve_bytes - fewer.reserve_bytes == 4 * 248 * 4 * 100_000
    room = AvailableMemory(usual.reserve_bytes, "left of the container's limit")
    with pytest.raises(ConfigurationError, match=r"--model .*a rank needs about .* a lower --max-requests"):
        plan_engine(options, facts, room)
    assert plan_engine(with_requests(options, 8), facts, room).kv_cache_bytes
