"""The launcher's checks and sizes for models with recurrent layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from runtime_support.small_facts import BYTES_PER_TOKEN, PLENTY, SMALL_FACTS

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.launch.inspection import CheckpointFacts
from megatron_runtime.launch.options import EngineOptions, LaunchOptions, ModelSource
from megatron_runtime.launch.preflight import EnginePlan, plan_engine
from megatron_runtime.launch.quantity import parse_bytes

STATES = 3 * 2**20
FACTS = replace(SMALL_FACTS, architecture="mixed", cache_layout=replace(SMALL_FACTS.cache_layout, state_bytes=STATES))
BLOCK = 16 * BYTES_PER_TOKEN


def plan(folder: Path, facts: CheckpointFacts = FACTS, **engine: float | str) -> EnginePlan:
    chosen = EngineOptions(dtype="float32", **engine)  # type: ignore[arg-type]
    options = LaunchOptions(model=ModelSource(path=folder), engine=chosen)
    return plan_engine(options, facts, PLENTY)


def test_the_states_of_one_request_and_a_block_are_the_smallest_cache(tmp_path: Path) -> None:
    assert plan(tmp_path, kv_cache_bytes=STATES + BLOCK).max_sequence_length == 16
    with pytest.raises(
        ConfigurationError, match=r"single block of 16 tokens and 3Mi of recurrent states; give at least"
    ):
        plan(tmp_path, kv_cache_bytes=STATES)


@pytest.mark.parametrize(
    "requests",
    [
        {},
        {"max_requests": 2},
        {"max_requests": 2, "mamba_memory_ratio": 0.999},
        {"max_requests": 2, "prefix_caching_mamba_gb": STATES / 2**30},
    ],
)
def test_a_cache_for_a_length_has_room_for_the_states(requests: dict[str, float], tmp_path: Path) -> None:
    length = {"max_sequence_length": 512} | requests
    with pytest.raises(ConfigurationError, match=r"use \d+ or less, or --kv-cache-memory (\S+) or more$") as error:
        plan(tmp_path, kv_cache_bytes=max(requests.get("max_requests", 1), 1) * (STATES + BLOCK), **length)
    needed = parse_bytes(str(error.value).split()[-3], "--kv-cache-memory")
    assert plan(tmp_path, kv_cache_bytes=needed + 2**16, **length).max_sequence_length == 512


@pytest.mark.parametrize(
    ("engine", "longest"),
    [({}, 9216), ({"prefix_caching": False}, 12288), ({"max_sequence_length": 12288}, 12288)],
)
def test_snapshots_take_a_quarter_of_the_room_for_blocks_unless_a_length_needs_it(
    engine: dict[str, int], longest: int, tmp_path: Path
) -> None:
    sizes = {"kv_cache_bytes": 2 * STATES + 4 * STATES, "max_requests": 2} | engine
    assert plan(tmp_path, replace(FACTS, longest=2**16), **sizes).max_sequence_length == longest


def test_speculation_is_refused(tmp_path: Path) -> None:
    words = "^--num-speculative-tokens 4: mixed has recurrent layers, .* use 0, or omit it$"
    with pytest.raises(ConfigurationError, match=words):
        plan(tmp_path, num_speculative_tokens=4)


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({"mamba_memory_ratio": 0.25}, 15360),
        ({"mamba_memory_ratio": 0.25, "prefix_caching_mamba_gb": STATES / 2**30}, 18432),
        ({"mamba_memory_ratio": 0.5, "prefix_caching_mamba_gb": 0}, 12288),
    ],
)
def test_the_settings_for_the_states_change_the_room_for_blocks(
    settings: dict[str, float], longest: int, tmp_path: Path
) -> None:
    facts = replace(FACTS, longest=2**16)
    assert plan(tmp_path, facts, kv_cache_bytes=8 * STATES, **settings).max_sequence_length == longest


@pytest.mark.parametrize(
    ("facts", "settings", "words"),
    [
        (FACTS, {"mamba_memory_ratio": 0.1}, "^--mamba-memory-ratio 0.1: this part of .* raise it"),
        (FACTS, {"prefix_caching_mamba_gb": 0.001}, "^--prefix-caching-mamba-gb 0.001: a copy .* set as much or more"),
        (FACTS, {"prefix_caching_mamba_gb": 1.0}, "^--prefix-caching-mamba-gb 1.0: of the pool.* lower it"),
        (SMALL_FACTS, {"mamba_memory_ratio": 0.5}, "^--mamba-memory-ratio 0.5: .* has no recurrent layers; leave it"),
    ],
)
def test_settings_for_the_states_that_do_not_fit_are_refused(
    facts: CheckpointFacts, settings: dict[str, float], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        plan(tmp_path, facts, kv_cache_bytes=2 * STATES, **settings)


@pytest.mark.parametrize(
    ("facts", "settings", "words"),
    [
        (FACTS, {"prefix_caching_mamba_gb": 0.001}, "^--prefix-caching-mamba-gb 0.001: a copy .* set as much or more"),
        (SMALL_FACTS, {"mamba_memory_ratio": 0.5}, "^--mamba-memory-ratio 0.5: .* has no recurrent layers; leave it"),
    ],
)
def test_a_cache_that_a_gpu_measures_has_the_same_settings(
    facts: CheckpointFacts, settings: dict[str, float], words: str, tmp_path: Path
) -> None:
    assert plan(tmp_path, device="cuda").kv_cache_bytes is None
    with pytest.raises(ConfigurationError, match=words):
        plan(tmp_path, facts, device="cuda", **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mamba_memory_ratio": 1.5}, "^--mamba-memory-ratio 1.5: must be more than 0 and less than 1"),
        ({"prefix_caching_mamba_gb": -1.0}, "^--prefix-caching-mamba-gb -1.0: must be a number of at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], words: str, tmp_path: Path) -> None:
    engine = EngineOptions(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=words):
        LaunchOptions(model=ModelSource(path=tmp_path), engine=engine).check()
