"""Two tensor parallel ranks with a pretended GPU each: captured sums, the tokens of one CPU, and few launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpu_support import pretended_ranks
from gpu_support.small_engine import LOWER_CASE, generate, one_layer, small_engine, suspend_and_resume
from runtime_support.rank_processes import run_ranks
from suite_support.worker import free_port

from megatron_runtime.parallel.layout import ParallelSizes

SIZES = ParallelSizes(tensor=2)
LENGTHS = (4, 2, 3)
"""Of the answers: passes of 3, 2 and 1 requests."""
LAUNCHES_PER_LAYER = 11
"""The sums of attention and network over the ranks among them."""
LAUNCHES_AROUND_LAYERS = 20

CASES: dict[str, dict[str, Any]] = {
    "samplers": {"params": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "top_n_sigma": 3.0}},
    "grammar": {"params": {"temperature": 1.0, "grammar": LOWER_CASE, "ignore_eos": False}},
    "edits, log probs": {
        "params": {"temperature": 0.7, "repetition_penalty": 1.3, "return_log_probs": True, "top_n_logprobs": 3}
    },
    "penalties": {
        "params": {"temperature": 0.8, "frequency_penalty": 0.7, "presence_penalty": 0.2, "repetition_penalty": 1.2}
    },
    "offload": {
        "config": {"kv_cache_management_mode": "offload", "offload_weights": True},
        "between": suspend_and_resume,
    },
}


@pytest.mark.parametrize("names", [("samplers", "grammar", "penalties"), ("edits, log probs", "offload")], ids=str)
def test_graphs_of_two_ranks_give_the_tokens_of_the_cpu(device_guard: Path, names: tuple[str, ...]) -> None:
    """In passes without edits both begin the next pass with the tokens that they have sampled on their devices."""
    cases = [CASES[name] for name in names]
    found = run_ranks(pretended_ranks.answer, 2, SIZES, free_port(), device_guard, cases, LENGTHS)
    for case, seen in zip(cases, found[0], strict=True):
        engine = small_engine(one_layer(), **case.get("config", {}))
        assert seen["tokens"] == generate(engine, case.get("params", {}), case.get("between"), LENGTHS)
        assert seen["replays"] > 0
        assert "config" in case or seen["copies"] == {}
    assert [seen["tokens"] for seen in found[1]] == [seen["tokens"] for seen in found[0]]


def test_a_rank_has_few_launches_and_waits_once_for_its_own_tokens(device_guard: Path) -> None:
    params = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
    for counted in run_ranks(pretended_ranks.count, 2, SIZES, free_port(), device_guard, params):
        one, two = counted["launches of a graph"]
        assert two - one <= LAUNCHES_PER_LAYER
        assert one - (two - one) <= LAUNCHES_AROUND_LAYERS
        assert counted["graph"] == 3
        assert counted["step"] == (2, 2, 1, {}, 1)


def test_a_captured_sum_is_repeated_with_the_values_of_each_replay(device_guard: Path) -> None:
    assert run_ranks(pretended_ranks.add_up_on_device, 2, SIZES, free_port(), device_guard) == [[3.0, 30.0]] * 2
