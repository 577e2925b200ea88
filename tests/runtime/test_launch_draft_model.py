"""The launcher's checks of a draft model before it starts processes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime_support.small_facts import BYTES_PER_TOKEN, PLENTY, SMALL_FACTS

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.launch.options import EngineOptions, LaunchOptions, ModelSource
from megatron_runtime.launch.preflight import plan_engine

FACTS = replace(SMALL_FACTS, vocabulary=50)
BLOCK = 16 * BYTES_PER_TOKEN
"""Bytes of a block of the served model."""


def options(path: Path, **engine: Any) -> LaunchOptions:
    """Options with a draft model."""
    return LaunchOptions(
        model=ModelSource(path=path),
        engine=EngineOptions(dtype="float32", num_speculative_tokens=4, speculative_draft_model="/d", **engine),
    )


DRAFT = replace(FACTS, parameters=100, cache_layout=replace(FACTS.cache_layout, num_layers=1))


def test_weights_and_cache_of_a_draft_model_count(tmp_path: Path) -> None:
    drafting = options(tmp_path, tensor_parallel=2, kv_cache_bytes=40 * BLOCK)
    alone = plan_engine(drafting, FACTS, PLENTY)
    plan = plan_engine(drafting, replace(FACTS, draft=DRAFT), PLENTY)
    assert plan.weight_bytes == alone.weight_bytes + 4 * DRAFT.parameters
    assert alone.max_sequence_length == 512
    # A block has five layers instead of four.
    small = options(tmp_path, tensor_parallel=2, kv_cache_bytes=20 * BLOCK)
    assert plan_engine(small, FACTS, PLENTY).max_sequence_length == 20 * 16
    assert plan_engine(small, replace(FACTS, draft=DRAFT), PLENTY).max_sequence_length == 16 * 16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"vocabulary": 60},
            "--speculative-draft-model /d: its vocabulary has 60 tokens, but that of the served model",
        ),
        (
            {"cache_layout": replace(DRAFT.cache_layout, state_bytes=1)},
            "--speculative-draft-model /d: it has recurrent layers, whose states can't return",
        ),
        ({"longest": 100}, "it takes 100 tokens, but a sequence may have 512; use --max-sequence-length 100 or less"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    drafting = options(tmp_path)
    facts = replace(FACTS, draft=replace(DRAFT, **changes))
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        plan_engine(drafting, facts, PLENTY)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"speculative_draft_model": "/nowhere"},
            "--speculative-draft-model /nowhere: no such file or folder; give a .gguf file or a checkpoint folder",
        ),
        ({"num_speculative_tokens": 0}, "--speculative-draft-model /: has no effect with --num-speculative-tokens 0"),
        (
            {"pipeline_parallel": 2},
            "--speculative-draft-model /: not supported with --pipeline-parallel 2; use --tensor-parallel",
        ),
    ],
)
def test_a_flag_beside_a_draft_model_is_named_with_its_value(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    valid = options(tmp_path)
    valid = replace(valid, engine=replace(valid.engine, speculative_draft_model="/"))
    valid.check()
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        replace(valid, engine=replace(valid.engine, **changes)).check()
