"""The launcher's checks of the attention backend."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime_support.small_facts import PLENTY, SMALL_FACTS

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.launch.inspection import CheckpointFacts
from megatron_runtime.launch.options import EngineOptions, LaunchOptions, ModelSource
from megatron_runtime.launch.preflight import EnginePlan, plan_engine


def plan(facts: CheckpointFacts, **engine: Any) -> EnginePlan:
    """For a model on a GPU."""
    chosen = EngineOptions(**({"device": "cuda", "attention_backend": "flashinfer"} | engine))
    return plan_engine(LaunchOptions(model=ModelSource(path=Path("/m")), engine=chosen), facts, PLENTY)


def test_the_plan_is_the_same_as_without_it() -> None:
    assert plan(SMALL_FACTS) == plan(SMALL_FACTS, attention_backend="auto")


@pytest.mark.parametrize(
    ("changes", "layout", "words"),
    [
        ({"device": "cpu"}, {}, "--attention-backend flashinfer: it computes on GPUs, and the device is cpu; use auto"),
        ({"attention_backend": "fast"}, {}, "--attention-backend fast: use one of auto, flashinfer"),
        ({"dtype": "float32"}, {}, "it computes in float16 and bfloat16, not with --dtype float32"),
        ({"kv_cache_dtype": "fp8"}, {}, "--kv-cache-dtype fp8 is not supported with it"),
        ({"batch_invariant": True}, {}, "so --batch-invariant is not possible"),
        ({}, {"values_in_keys": True}, "llama has multi-head latent attention, which is not supported with it"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], layout: dict[str, Any], words: str) -> None:
    facts = replace(SMALL_FACTS, cache_layout=replace(SMALL_FACTS.cache_layout, **layout))
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        plan(facts, **changes)
