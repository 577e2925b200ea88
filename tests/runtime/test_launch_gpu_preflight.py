"""What the launcher knows of a GPU's memory before its ranks start, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime_support.small_facts import PLENTY

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.launch.device_memory import device_memory
from megatron_runtime.launch.inspection import CheckpointFacts
from megatron_runtime.launch.memory import AvailableMemory
from megatron_runtime.launch.options import EngineOptions, LaunchOptions, ModelSource
from megatron_runtime.launch.preflight import plan_engine
from megatron_runtime.launch.quantity import parse_bytes
from megatron_runtime.model.cache_layout import CacheLayout

MODEL_8B = CheckpointFacts(
    path="/m",
    architecture="llama",
    layers=32,
    parameters=8_030_000_000,
    longest=131072,
    cache_layout=CacheLayout(num_layers=32, heads=8, key_width=128, value_width=128),
    activation_elements=60_000,
    vocabulary=128_256,
)


@pytest.fixture
def options(tmp_path: Path) -> LaunchOptions:
    """Valid options."""
    return LaunchOptions(model=ModelSource(path=tmp_path))


def on_gpu(options: LaunchOptions, size: str | None, **engine: Any) -> str:
    """The plan's line for the log, or the reason why it is refused, of an 8B model on a GPU of this size."""
    device = None if size is None else AvailableMemory(parse_bytes(size, ""), "as given by --device-memory")
    try:
        wanted = replace(options, engine=EngineOptions(device="cuda", dtype="bfloat16", **engine))
        return plan_engine(wanted, MODEL_8B, PLENTY, device).describe()
    except ConfigurationError as error:
        return str(error)


def test_the_plan_of_a_gpu_rank_has_weights_cache_and_reserve(options: LaunchOptions) -> None:
    assert on_gpu(options, "80Gi") == (
        "weights 15Gi, KV cache about 54.7Gi (0.9 of the rest of the GPU's memory, 80Gi (as given by "
        "--device-memory)), reserve 4.3Gi, up to 131072 tokens"
    )
    assert "KV cache 0.9 of the rest of the GPU's memory, whose size is unknown, reserve" in on_gpu(options, None)
    assert on_gpu(options, "80Gi", kv_cache_bytes=2**30).endswith("KV cache 1Gi, reserve 4.3Gi, up to 8192 tokens")


def test_the_reserve_has_logits_after_each_draft(options: LaunchOptions) -> None:
    """4 copies of 256 rows more for each draft, and of 256 MiB for prompts, at most of the tokens of a pass."""
    assert "reserve 6.3Gi" in on_gpu(options, "80Gi", num_speculative_tokens=4)
    assert "reserve 34.1Gi" in on_gpu(options, "80Gi", num_speculative_tokens=100)


def test_a_gpu_that_is_too_small_is_refused_before_the_start(options: LaunchOptions) -> None:
    words = on_gpu(options, "16Gi")
    assert words.startswith(f"{options.model.flag}: a rank needs 15Gi for the weights and about 4.3Gi for a pass,")
    assert "its GPU has 16Gi (as given by --device-memory); use a smaller --dtype, more ranks with --tensor" in words
    assert on_gpu(options, "16Gi", tensor_parallel=2).startswith("weights 7.5Gi")
    words = on_gpu(options, "24Gi", kv_cache_bytes=20 * 2**30)
    assert words.startswith("--kv-cache-memory 20Gi: with 15Gi for the weights and about 4.3Gi for a pass, a rank")
    assert "but its GPU has 24Gi (as given by --device-memory); use 4.6Gi or less, or omit the size" in words


def test_the_size_of_the_smallest_gpu_comes_from_nvidia_smi(
    options: LaunchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    cuda = replace(options.engine, device="cuda")
    assert device_memory(options.engine) is None
    assert device_memory(cuda) is None
    assert "the memory of the GPUs is unknown before the ranks start: " in caplog.text
    program.write_text("#!/bin/sh\n[ $1 = --query-gpu=memory.total ] && printf '81559\\n40960\\n'\n")
    program.chmod(0o755)
    assert device_memory(cuda) == AvailableMemory(40 * 2**30, "as nvidia-smi reports")
    assert device_memory(replace(cuda, device_memory_bytes=5)) == AvailableMemory(5, "as given by --device-memory")
    program.write_text("#!/bin/sh\necho No devices were found\nexit 6\n")
    assert device_memory(cuda) is None
