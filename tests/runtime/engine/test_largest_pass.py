"""The pass that a GPU's memory is measured with, and what its size leaves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from runtime_support.memory_shortages import ALLOCATOR, CUBLAS, Shortage

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.largest_pass import (
    largest_limits,
    limits_of_eager_passes,
    limits_of_graphs,
    run_largest_pass,
    share_for_kv_cache,
)
from megatron_runtime.engine.text_generation_controller import TextGenerationController
from megatron_runtime.errors import ConfigurationError, EngineError
from megatron_runtime.inference_request import Status
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams


def test_the_largest_pass_has_as_many_tokens_and_requests_as_the_limits_allow(
    tiny_model: Decoder, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = TextGenerationController(tiny_model, byte_tokenizer)
    config = InferenceConfig(max_tokens=96, max_requests=7, max_sequence_length=128, block_size_tokens=4)
    limits = dataclasses.replace(largest_limits(controller, config), prompt_logits=10)
    seen: list[Any] = []
    run = controller.run

    def noting(*arguments: Any) -> Any:
        seen.append((arguments, run(*arguments)))
        return seen[-1][1]

    monkeypatch.setattr(controller, "run", noting)
    run_largest_pass(controller, limits)
    ((batch, cache, rules, sampled_rows, wanted, _, _), output) = seen[0]
    assert batch.logit_rows is not None
    assert (len(batch.tokens), len(batch.logit_rows), batch.context_lengths.tolist()) == (96, 17, [*[1] * 6, 128])
    assert batch.logit_rows[sampled_rows].tolist() == [*range(6), 95]
    assert cache.num_blocks < -(-128 // 4)
    assert int(batch.block_tables.max()) < cache.num_blocks
    assert torch.equal(batch.slots // 4, torch.cat((torch.zeros(6), torch.arange(38, 128) // 4 % cache.num_blocks)))
    assert (rules.ranks.all(), wanted.top_n, len(output.log_probs.chosen)) == (True, 20, 17)
    assert len(output.tokens) == 7
    assert len(output.pooled) == 1


@pytest.mark.parametrize(("tokens", "requests", "length"), [(8, 8, 512), (512, 1, 16), (512, 40, 512), (512, 40, 16)])
def test_the_largest_pass_is_possible_with_any_limits(
    tiny_model: Decoder, byte_tokenizer: Tokenizer, tokens: int, requests: int, length: int
) -> None:
    controller = TextGenerationController(tiny_model, byte_tokenizer)
    config = InferenceConfig(max_tokens=tokens, max_requests=requests, max_sequence_length=length)
    run_largest_pass(controller, largest_limits(controller, config))


def test_several_requests_share_the_tokens_of_the_largest_pass(
    tiny_model: Decoder, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request of the longest context would leave most of the tokens out."""
    controller = TextGenerationController(tiny_model, byte_tokenizer)
    config = InferenceConfig(max_tokens=96, max_requests=7, max_sequence_length=40)
    seen: list[Any] = []
    monkeypatch.setattr(controller, "run", lambda batch, *_: seen.append(batch))
    run_largest_pass(controller, largest_limits(controller, config))
    assert seen[0].query_starts.diff().tolist() == [1, 1, 1, 1, 12, 40, 40]
    assert seen[0].context_lengths.tolist() == [1, 1, 1, 1, 40, 40, 40]
    assert seen[0].positions[4:16].tolist() == list(range(28, 40))


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, None),
        ({"num_cuda_graphs": -1}, (512, 40)),
        ({"num_cuda_graphs": -1, "use_cuda_graphs_for_non_decode_steps": False}, (40, 40)),
        ({"num_cuda_graphs": -1, "cuda_graph_all_prefills": True}, (1024, 40)),
        ({"num_cuda_graphs": -1, "num_speculative_tokens": 3}, (512, 160)),
    ],
)
def test_the_largest_pass_of_graphs_has_their_tokens_and_requests(
    tiny_model: Decoder, byte_tokenizer: Tokenizer, settings: dict[str, Any], sizes: tuple[int, int] | None
) -> None:
    controller = TextGenerationController(tiny_model, byte_tokenizer)
    config = InferenceConfig(max_tokens=1024, max_requests=40, max_sequence_length=512, **settings)
    limits = limits_of_graphs(config, largest_limits(controller, config))
    assert (None if limits is None else (limits.max_tokens, limits.max_requests)) == sizes
    if limits is not None:
        run_largest_pass(controller, limits)


@pytest.mark.parametrize(("drafts", "rows"), [(0, 20), (3, 80), (9, 96)])
def test_an_eager_pass_samples_after_each_draft(
    tiny_model: Decoder, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, drafts: int, rows: int
) -> None:
    """As far as the pass has room for drafts."""
    controller = TextGenerationController(tiny_model, byte_tokenizer)
    config = InferenceConfig(max_tokens=96, max_requests=20, max_sequence_length=40, num_speculative_tokens=drafts)
    seen: list[Any] = []
    monkeypatch.setattr(controller, "run", lambda *arguments: seen.append(arguments))
    run_largest_pass(controller, limits_of_eager_passes(config, largest_limits(controller, config)))
    ((batch, _, _, sampled_rows, *_),) = seen
    assert (len(sampled_rows), len(batch.tokens)) == (rows, 96)


def test_the_kv_cache_gets_nine_tenths_of_the_rest() -> None:
    assert share_for_kv_cache(free=70 * 2**30, total=80 * 2**30, largest_pass=10 * 2**30) == 54 * 2**30
    words = r"of the GPU's 80 GiB, .* use 78 GiB, and the largest pass needs 2.5 GiB; use a smaller --dtype"
    with pytest.raises(ConfigurationError, match=words):
        share_for_kv_cache(free=2 * 2**30, total=80 * 2**30, largest_pass=5 * 2**29)


@pytest.mark.parametrize(("scores_prompt", "shortage"), [(False, ALLOCATOR), (True, ALLOCATOR), (True, CUBLAS)])
def test_a_pass_that_runs_out_of_memory_ends_its_largest_requests_alone(
    tiny_model: Decoder,
    byte_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    scores_prompt: bool,
    shortage: Shortage,
) -> None:
    engine = DynamicInferenceEngine.build(tiny_model, byte_tokenizer, InferenceConfig(kv_cache_memory_bytes=1 << 20))
    run = engine.controller.run

    def failing(*arguments: Any) -> Any:
        if len(arguments[0].tokens) > 20:
            shortage.fail()
        return run(*arguments)

    monkeypatch.setattr(engine.controller, "run", failing)
    greedy = SamplingParams(temperature=0.0, num_tokens_to_generate=4, ignore_eos=True)
    small = engine.add_request(1, [65] * 4, greedy)
    large = engine.add_request(
        2, [66] * 30, dataclasses.replace(greedy, return_log_probs=scores_prompt, skip_prompt_log_probs=False)
    )
    while engine.has_unfinished_requests():
        engine.step_modern()
        engine.check_integrity()
    failed = large.result(timeout=0)[-1]
    assert failed.status is Status.FAILED
    (error,) = (event.payload for event in failed.events if event.type.is_error)
    assert isinstance(error, EngineError)
    assert str(error).startswith(f"cpu ran out of memory in a pass of 34 tokens ({shortage.cause}); lower --kv-cache")
    assert (small.result(timeout=0)[-1].status is Status.COMPLETED) == scores_prompt
    after = engine.add_request(3, [65] * 4, greedy)
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert len(after.result(timeout=0)[-1].generated_tokens) == 4
