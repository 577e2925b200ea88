"""Embeddings of the engine: pooled hidden states, compared with transformers' and between divisions into passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support.tiny_checkpoint import write_tiny_checkpoint
from transformers import AutoModel

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.inference_request import DynamicInferenceRequest
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.sampling_params import SamplingParams

PROMPTS = [[7, 3, 200, 41, 5, 6, 7, 8, 9, 10, 11], [65], list(range(100, 131)), [7, 3, 200, 41, 5, 6, 7, 8, 12]]
LONG = [*range(256), *range(100)]
BLOCK = 4
CLOSE = {"atol": 1e-4, "rtol": 0.0}

NewEngine = Callable[..., DynamicInferenceEngine]


def pooling(kind: str, **params: Any) -> SamplingParams:
    """The parameters of a request for an embedding."""
    return SamplingParams(temperature=0, num_tokens_to_generate=0, pooling=kind, **params)


def embed(engine: DynamicInferenceEngine, prompts: list[list[int]], kind: str) -> list[DynamicInferenceRequest]:
    """The results, in the order of the prompts."""
    results = [record.merge() for record in engine.generate(prompts, pooling(kind))]
    engine.check_integrity()
    return results


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("pooling"), layers=3)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, list[torch.Tensor]]:
    """The embeddings of the prompts by transformers."""
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]
    return {"last": [each[-1] for each in states], "mean": [each.mean(0) for each in states]}


@pytest.fixture(scope="module")
def new_engine(checkpoint: Path) -> NewEngine:
    """Creates engines over one model."""
    model, tokenizer = load_model(checkpoint, dtype="float32"), load_tokenizer(checkpoint)

    def create(**settings: Any) -> DynamicInferenceEngine:
        config = {"block_size_tokens": BLOCK, "buffer_size_gb": 0.001, **settings}
        return DynamicInferenceEngine.build(model, tokenizer, InferenceConfig(**config))

    return create


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_embeddings_are_the_hidden_states_of_transformers(
    new_engine: NewEngine, expected: dict[str, list[torch.Tensor]], kind: str
) -> None:
    results = embed(new_engine(), PROMPTS, kind)
    for result, wanted in zip(results, expected[kind], strict=True):
        torch.testing.assert_close(torch.tensor(result.embedding), wanted, **CLOSE)
        assert (result.generated_tokens, result.finish_reason, result.ttft) == ([], "stop", None)


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_the_division_of_a_prompt_into_passes_does_not_change_its_embedding(new_engine: NewEngine, kind: str) -> None:
    whole = embed(new_engine(), PROMPTS, kind)
    limits = {"enable_chunked_prefill": True, "max_tokens": 5, "max_requests": 2}
    chunked = embed(new_engine(**limits), PROMPTS, kind)
    for one, other in zip(whole, chunked, strict=True):
        assert torch.equal(torch.tensor(one.embedding), torch.tensor(other.embedding))


@pytest.mark.parametrize(("kind", "cached"), [("last", [8, 0, 28, 8]), ("mean", [0, 0, 0, 0])])
def test_only_the_last_state_is_computed_after_a_cached_prefix(
    new_engine: NewEngine, expected: dict[str, list[torch.Tensor]], kind: str, cached: list[int]
) -> None:
    engine = new_engine(enable_prefix_caching=True)
    embed(engine, PROMPTS, kind)
    results = embed(engine, PROMPTS, kind)
    assert [result.num_cached_tokens for result in results] == cached
    for result, wanted in zip(results, expected[kind], strict=True):
        torch.testing.assert_close(torch.tensor(result.embedding), wanted, **CLOSE)
    answers = engine.generate(PROMPTS[:1], SamplingParams(temperature=0, num_tokens_to_generate=1))
    assert answers[0].merge().num_cached_tokens == 8, "requests for a mean fill the prefix cache too"


def test_an_evicted_request_begins_its_sum_anew(new_engine: NewEngine) -> None:
    engine = new_engine(enable_chunked_prefill=True, max_tokens=5, max_requests=2, kv_cache_management_mode="recompute")
    future = engine.add_request(0, PROMPTS[2], pooling("mean"))
    engine.step_modern()
    engine.suspend()
    engine.resume()
    while engine.has_unfinished_requests():
        engine.step_modern()
    interrupted = future.result().merge()
    whole = embed(new_engine(), [PROMPTS[2]], "mean")[0]
    assert len(future.result().requests) == 1
    assert torch.equal(torch.tensor(interrupted.embedding), torch.tensor(whole.embedding))


def test_the_mean_of_a_long_prompt_is_that_of_all_its_tokens(new_engine: NewEngine, checkpoint: Path) -> None:
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([LONG])).last_hidden_state[0].mean(0)
    (result,) = embed(new_engine(), [LONG], "mean")
    torch.testing.assert_close(torch.tensor(result.embedding), expected, **CLOSE)


def test_embeddings_and_answers_share_passes(new_engine: NewEngine, expected: dict[str, list[torch.Tensor]]) -> None:
    engine = new_engine()
    generating = SamplingParams(temperature=0, num_tokens_to_generate=6, ignore_eos=True, return_log_probs=True)
    alone = engine.generate([PROMPTS[0]], generating)[0].merge()
    params = [pooling("mean"), generating, pooling("last"), pooling("mean")]
    results = [record.merge() for record in engine.generate([PROMPTS[0], PROMPTS[0], PROMPTS[2], PROMPTS[3]], params)]
    assert results[1].generated_tokens == alone.generated_tokens
    assert results[1].prompt_log_probs == alone.prompt_log_probs
    assert results[1].embedding is None
    for index, kind, place in ((0, "mean", 0), (2, "last", 2), (3, "mean", 3)):
        torch.testing.assert_close(torch.tensor(results[index].embedding), expected[kind][place], **CLOSE)


def test_an_aborted_request_has_no_embedding(new_engine: NewEngine) -> None:
    engine = new_engine(enable_chunked_prefill=True, max_tokens=5, max_requests=2)
    future = engine.add_request(0, PROMPTS[2], pooling("mean"))
    engine.step_modern()
    engine.abort_request(0)
    assert future.result().merge().embedding is None


def test_a_prompt_as_long_as_the_context_has_an_embedding(new_engine: NewEngine) -> None:
    engine = new_engine(max_sequence_length=len(PROMPTS[2]))
    assert len(embed(engine, [PROMPTS[2]], "last")[0].embedding or ()) == 32


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"pooling": "max"}, "pooling='max' must be one of last, mean"),
        ({"pooling": "mean"}, "pooling='mean' generates no tokens; set num_tokens_to_generate=0"),
    ],
)
def test_invalid_pooling_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as error:
        SamplingParams(**params)
    assert error.value.field == "pooling"
