"""The launcher's checks of a KV cache in fp8, and its plan."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime_support.small_facts import BYTES_PER_TOKEN, PLENTY, SMALL_FACTS

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.launch.inspection import CheckpointFacts
from megatron_runtime.launch.options import EngineOptions, LaunchOptions, ModelSource
from megatron_runtime.launch.preflight import EnginePlan, plan_engine


def plan(facts: CheckpointFacts, **engine: Any) -> EnginePlan:
    """For a model in float32 on a GPU."""
    chosen = EngineOptions(**({"dtype": "float32", "device": "cuda"} | engine))
    return plan_engine(LaunchOptions(model=ModelSource(path=Path("/m")), engine=chosen), facts, PLENTY)


def test_a_cache_in_fp8_has_a_byte_for_each_number() -> None:
    """But that of the draft model keeps the dtype."""
    size = 32 * BYTES_PER_TOKEN
    lengths = [
        plan(SMALL_FACTS, kv_cache_bytes=size, kv_cache_dtype=kind).max_sequence_length for kind in ("auto", "fp8")
    ]
    assert lengths == [32, 128]
    drafted = replace(SMALL_FACTS, draft=SMALL_FACTS)
    options = {"kv_cache_bytes": 5 * size, "num_speculative_tokens": 2, "speculative_draft_model": "/draft"}
    found = [plan(drafted, **options, kv_cache_dtype=kind).max_sequence_length for kind in ("auto", "fp8")]
    assert found == [5 * 32 // 2, 4 * 32]


@pytest.mark.parametrize(
    ("changes", "layout", "words"),
    [
        ({"device": "cpu"}, {}, "--kv-cache-dtype fp8: the device is cpu, which has no kernels for keys and values in"),
        ({"kv_cache_dtype": "int8"}, {}, "--kv-cache-dtype int8: use one of auto, fp8"),
        ({}, {"values_in_keys": True}, "llama has multi-head latent attention, whose cache is not supported in fp8"),
        ({}, {"state_bytes": 64}, "llama has recurrent layers, whose cache is not supported in fp8; use auto"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], layout: dict[str, Any], words: str) -> None:
    facts = replace(SMALL_FACTS, cache_layout=replace(SMALL_FACTS.cache_layout, **layout))
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        plan(facts, **({"kv_cache_dtype": "fp8"} | changes))
