"""Drafts of a draft model on a pretended GPU: the tokens of the CPU without drafts, and what a round costs."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_support.pretended import PretendedDevice, Work
from gpu_support.small_engine import generate, on_gpu, one_layer, small_engine, with_noise

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.sampling_params import SamplingParams

DRAFTS = 3
LENGTHS = (6, 13, 9)
"""Of the answers."""
LAUNCHES_PER_ROUND = 17
"""10 for the layer, 5 around it, and 2 to sample the most likely tokens."""
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "edits": {"temperature": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 2},
}

pytestmark = pytest.mark.usefixtures("device_guard", "short_splits")


def drafting_engine(model: Decoder, draft: Decoder, **config: Any) -> DynamicInferenceEngine:
    """With graphs for up to 3 requests and their drafts, all of which are permitted."""
    settings: dict[str, Any] = {"num_cuda_graphs": -1, "max_requests": 3, "num_speculative_tokens": DRAFTS}
    engine = small_engine(on_gpu(model), speculative_draft_model=on_gpu(draft), **(settings | config))
    engine.context.clock = lambda: 0.0  # Drafts are permitted whatever they cost here.
    return engine


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_a_draft_model_changes_no_token(params: dict[str, Any], device: PretendedDevice) -> None:
    model = one_layer()
    expected = generate(small_engine(model), params, lengths=LENGTHS)
    engine = drafting_engine(model, with_noise(model), enable_prefix_caching=True)
    device.work = Work()
    assert generate(engine, params, lengths=LENGTHS) == expected
    stats = engine.stats()
    assert 0 < stats.accepted_draft_tokens_total < stats.draft_tokens_total
    assert +device.work.copies == {}
    engine.check_integrity()


def test_a_round_has_the_launches_of_an_eager_pass_one_copy_and_one_wait(device: PretendedDevice) -> None:
    """Whatever the number of requests. The pass that verifies the drafts is a graph, as if they were requests."""
    model = one_layer()
    counted = []
    for count in (1, 3):
        engine = drafting_engine(model, model)
        for index in range(count):
            given = {"num_tokens_to_generate": 40, "temperature": 0.0, "ignore_eos": True}
            engine.add_request(index, [65 + index] * 5, SamplingParams(**given))
        sizes = []
        for _ in range(4):
            drafts = engine.stats().draft_tokens_total
            device.work = Work()
            sizes.append(engine.step_modern()["cuda_graph_request_count"])
        assert engine.stats().draft_tokens_total == drafts + count * DRAFTS
        assert sizes[-1] == {1: 6, 3: 12}[count]
        assert device.work.replays == 2
        assert device.work.pinned_copies == 1 + DRAFTS
        assert sum(device.work.waits.values()) == 1 + DRAFTS
        assert +device.work.copies == {}
        counted.append(device.work.launches - device.work.replays)
    assert counted[0] == counted[1]
    assert counted[0] <= DRAFTS * LAUNCHES_PER_ROUND
