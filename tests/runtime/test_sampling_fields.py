"""Every sampling filter has its parameter, its HTTP field and its row in the docs, with one range."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_runtime.engine.sampling.filters import EDITS, TRUNCATIONS
from megatron_runtime.sampling_params import DEFAULTS, RANGES, SamplingParams
from megatron_runtime.server.bodies.protocol import CompletionBody
from megatron_runtime.server.bodies.sampling import sample_seed, sampling_params
from megatron_runtime.server.bodies.sampling_fields import SamplingFields

PAGE = Path(__file__).parents[2] / "docs" / "sampling.md"
EDITED = [name for kind in EDITS for name in kind.parameters]
TRUNCATED = [name for kind in TRUNCATIONS for name in kind.parameters]
STRICTER: dict[str, dict[str, Any]] = {"temperature": {"maximum": 2.0}, "top_p": {"minimum": None}}
"""Where HTTP is stricter than the library."""


def rows_of_page() -> dict[str, list[str]]:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text().partition("\n## ")[0], re.MULTILINE)
    return {name: cells.split(" | ") for name, cells in rows}


def test_the_page_lists_the_filters_in_the_order_in_which_they_apply() -> None:
    assert [*rows_of_page()] == [*EDITED, "temperature", *TRUNCATED]


@pytest.mark.parametrize("name", [name for name in [*EDITED, *TRUNCATED, "temperature"] if name in RANGES])
def test_the_page_has_the_range_and_default_of_the_parameter(name: str) -> None:
    limits, (shown, default, _) = RANGES[name], rows_of_page()[name]
    is_open = math.isinf(limits.maximum)
    assert shown == (f"{limits.minimum:g} or more" if is_open else f"{limits.minimum:g} to {limits.maximum:g}")
    assert (None if default == "none" else float(default)) == DEFAULTS[name]


@pytest.mark.parametrize("name", [*EDITED, *TRUNCATED])
def test_a_filter_has_its_parameter_and_its_field(name: str) -> None:
    assert name in DEFAULTS
    assert name in SamplingFields.model_fields or name == "grammar"


@pytest.mark.parametrize("name", sorted(RANGES.keys() & SamplingFields.model_fields.keys()))
def test_the_range_of_a_field_is_that_of_its_parameter(name: str) -> None:
    limits = RANGES[name]
    field = CompletionBody.model_json_schema()["properties"][name]
    field |= field.get("anyOf", [{}])[0]  # of a field that may be null
    expected = {"minimum": limits.minimum, "maximum": limits.maximum if math.isfinite(limits.maximum) else None}
    if name == "top_k":
        expected["minimum"] = -1
    expected |= STRICTER.get(name, {})
    assert {bound: field.get(bound) for bound in expected} == expected
    assert field["default"] == (1.0 if name == "top_p" else DEFAULTS[name])
    for value in {limits.minimum - 2, limits.maximum + 1} - {math.inf}:
        with pytest.raises(ValidationError, match=name):
            CompletionBody.model_validate({"model": "m", "prompt": "a", name: value})


def test_fields_reach_the_parameters() -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "top_n_sigma": 1.5,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "min_tokens": 3,
        "bad_words": ["no"],
        "allowed_token_ids": [5, 6],
        "thinking_token_budget": 12,
        "skip_special_tokens": False,
        "stop_token_ids": [5],
        "ignore_eos": True,
        "priority": -4,
        "cache_salt": "team",
    }
    assert given.keys() | {"logit_bias"} == SamplingFields.model_fields.keys()
    body = CompletionBody.model_validate({"model": "m", "prompt": "a", "logit_bias": {"3": 1}, "seed": -1, **given})
    params = sampling_params(body, limit=9, vocab_size=100)
    assert {name: getattr(params, name) for name in given} == given
    assert (params.logit_bias, params.seed) == ({3: 1.0}, None)
    assert [sample_seed(body, sample) for sample in (0, 1)] == [2**64 - 1, 0]


def test_the_defaults_of_a_request_use_no_filter() -> None:
    body = CompletionBody.model_validate({"model": "m", "prompt": "a", "top_k": -1})
    params = sampling_params(body, limit=9, vocab_size=100)
    assert params == SamplingParams(top_p=1.0, num_tokens_to_generate=9, skip_prompt_log_probs=True, stop_token_ids=[])
