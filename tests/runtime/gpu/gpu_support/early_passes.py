"""Engines on the pretended device whose passes begin before the tokens of the last one are known."""

from __future__ import annotations

from typing import Any

from gpu_support.small_engine import on_gpu, random_decoder, small_engine

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.next_pass import NextPass
from megatron_runtime.sampling_params import SamplingParams

PENALTIES = {"frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.2}


def captured_engine(**config: Any) -> DynamicInferenceEngine:
    """With graphs for up to 4 requests and 16 tokens; a model of one layer."""
    return small_engine(
        on_gpu(random_decoder(num_layers=1)), **({"num_cuda_graphs": -1, "cuda_graph_max_tokens": 16} | config)
    )


def add(engine: DynamicInferenceEngine, number: int, length: int, **params: Any) -> Any:
    given = {"temperature": 0.8, "seed": number, "num_tokens_to_generate": length, "ignore_eos": True} | params
    prompt = [65 + (number * 3 + at * at) % 60 for at in range(5 + number)]
    return engine.add_request(number, prompt, SamplingParams(**given))


def next_pass(engine: DynamicInferenceEngine) -> NextPass:
    found = engine._passes._starter._next
    assert found is not None
    return found


def finish(engine: DynamicInferenceEngine, futures: list[Any]) -> list[list[int]]:
    while engine.has_unfinished_requests():
        engine.step_modern()
        engine.check_integrity()
    return [future.result(timeout=0).merge().generated_tokens for future in futures]


def on_cpu(lengths: dict[int, int], **params: Any) -> list[list[int]]:
    """The tokens of each request."""
    engine = small_engine(random_decoder(num_layers=1), max_requests=8)
    return finish(engine, [add(engine, number, length, **params) for number, length in lengths.items()])
