"""Adapters of models with recurrent layers: answers and stored states belong to one adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_support.random_llama import random_llama
from engine_support.recurrent import KINDS, engine_of
from runtime_support.adapters import write_adapter_of

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.inference_request import DynamicInferenceRequest
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

NAMES = ("first", "second")
ADAPTERS = (None, *NAMES)
PROMPT = list(b"You answer in one word. ")
CACHED = 20
"""Tokens of PROMPT before its last end of a block."""


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def features(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.param
    return found


def engine_with_adapters(
    features: dict[str, Any], tokenizer: Tokenizer, folder: Path, *, snapshots: int, **settings: Any
) -> DynamicInferenceEngine:
    """An engine over a model of its own, with NAMES: adapters of all matrices that can have one."""
    model = random_llama(hidden=32, intermediate=48, std=0.3, **features)
    model.prepare()
    engine = engine_of(model, tokenizer, snapshots=snapshots, **settings)
    for seed, name in enumerate(NAMES):
        engine.adapters.load(name, write_adapter(engine, folder / name, seed))
    return engine


def write_adapter(engine: DynamicInferenceEngine, folder: Path, seed: int) -> Path:
    shapes = engine.controller.model.use_adapters().targets.shapes
    ends = sorted({name.rsplit(".", 1)[-1] for name in shapes})
    assert {"q_proj", "in_proj_qkvz", "out_proj"} < set(ends)
    return write_adapter_of(folder, shapes, targets=ends, seed=seed)


def params(adapter: str | None) -> SamplingParams:
    return SamplingParams(
        temperature=0,
        num_tokens_to_generate=10,
        ignore_eos=True,
        return_log_probs=True,
        skip_prompt_log_probs=True,
        adapter=adapter,
    )


Numbers = tuple[list[int], list[float]]


def numbers_of(request: DynamicInferenceRequest) -> Numbers:
    """The tokens of an answer and their log probabilities."""
    assert request.generated_log_probs is not None
    return list(request.generated_tokens), list(request.generated_log_probs)


def serve(engine: DynamicInferenceEngine, adapter: str | None) -> tuple[int, Numbers]:
    """The cached tokens of a request with PROMPT that is alone, and the numbers of its answer."""
    request = engine.generate([PROMPT], params(adapter))[0].merge()
    engine.check_integrity()
    return request.num_cached_tokens, numbers_of(request)


def test_stored_states_belong_to_the_contents_of_an_adapter(
    features: dict[str, Any], byte_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    engine = engine_with_adapters(features, byte_tokenizer, tmp_path, snapshots=8, blocks=100)
    first = [serve(engine, name) for name in ADAPTERS]
    assert [cached for cached, _ in first] == [0, 0, 0]
    assert len({tuple(tokens) for _, (tokens, _) in first}) == 3, "the adapters change the answer"
    assert [serve(engine, name) for name in ADAPTERS] == [(CACHED, numbers) for _, numbers in first]
    engine.adapters.load("first", tmp_path / "second")
    assert serve(engine, "first") == (CACHED, first[2][1]), "the same files under another name have the same states"
    engine.adapters.load("second", write_adapter(engine, tmp_path / "third", seed=7))
    cached, numbers = serve(engine, "second")
    assert cached == 0
    assert numbers != first[2][1]


@pytest.mark.parametrize(("blocks", "snapshots", "max_tokens"), [(120, 10, 1024), (24, 2, 24)])
def test_answers_of_a_mixed_batch_are_those_of_requests_alone(
    features: dict[str, Any], byte_tokenizer: Tokenizer, tmp_path: Path, blocks: int, snapshots: int, max_tokens: int
) -> None:
    """With the second sizes prompts are computed in chunks, and requests are evicted."""
    prompts = [[*PROMPT[: 7 * (index % 4)], index, *range(index % 9), index % 5] for index in range(18)]
    requests = [params(ADAPTERS[index % 3]) for index in range(len(prompts))]
    alone = engine_with_adapters(features, byte_tokenizer, tmp_path / "alone", snapshots=0)
    expected = [
        numbers_of(alone.generate([prompt], each)[0].merge()) for prompt, each in zip(prompts, requests, strict=True)
    ]
    folder = tmp_path / "together"
    sizes = {"blocks": blocks, "max_tokens": max_tokens}
    engine = engine_with_adapters(features, byte_tokenizer, folder, snapshots=snapshots, **sizes)
    for _ in range(2):
        answers = [numbers_of(record.merge()) for record in engine.generate(prompts, requests)]
        engine.check_integrity()
        assert answers == expected
    stats = engine.stats()
    assert stats.prefix_hits_total > 0
    assert (stats.evictions_total > 0) == (blocks == 24)
