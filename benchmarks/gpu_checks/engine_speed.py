"""The engine's whole steps with random weights, and what they take beside the work of the GPU."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from runtime_support.byte_backend import END, byte_backend

from gpu_checks.random_models import random_model
from gpu_checks.results import Check, Result, Sizes, free_memory
from gpu_checks.speed import wait
from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

TARGET = 0.3e-3
"""Seconds of a step beside the work of the GPU that this project aims at."""
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
GRAPHS_OF_STEP = 2
"""The model, and the sampler."""
WARM_UP_STEPS = 3
EARLY_TOKENS = 40
"""Most tokens of a request while the prompts of others are computed."""


@dataclass(frozen=True)
class Load:
    """The requests of the measurements of engines."""

    batches: tuple[int, ...]
    sampled_batch: int
    prompt: int
    """Tokens of each prompt."""
    steps: int
    """Of each measurement."""

    @property
    def length(self) -> int:
        """Most tokens of a request."""
        return self.prompt + EARLY_TOKENS + WARM_UP_STEPS + self.steps + 2


def load_of(sizes: Sizes) -> Load:
    """Small without a GPU."""
    if sizes.has_gpu:
        return Load(batches=(1, 32, 128, 256), sampled_batch=128, prompt=128, steps=40)
    return Load(batches=(1, 2), sampled_batch=2, prompt=5, steps=2)


def random_prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Token ids; no two prompts begin with the same ones."""
    generator = torch.Generator().manual_seed(11)
    return torch.randint(vocabulary, (count, length), generator=generator).tolist()


def checks(sizes: Sizes, rates: dict[int, float]) -> Iterator[Check]:
    """The tokens per second of greedy decoding are added to ``rates``, by batch."""
    yield "steps of the engine", partial(measure, sizes, rates)


def measure(sizes: Sizes, rates: dict[int, float]) -> Iterator[Result]:
    """The capture of the graphs, the time to the first token, and steps."""
    free_memory(has_gpu=sizes.has_gpu)
    load = load_of(sizes)
    engine = make_engine(random_model(sizes), sizes, load)
    stats = engine.capture_stats
    assert stats is not None, "this device permits CUDA graphs"
    allocated, reserved = (stats[f"{kind}_bytes"] / 1e9 for kind in ("allocated", "reserved"))
    words = f"{stats['time']:.3g} s, {allocated:.3g} GB allocated, {reserved:.3g} GB reserved"
    yield Result(f"capture of CUDA graphs for up to {max(load.batches)} requests", words)
    took = first_token_seconds(engine, sizes, load)
    yield Result(f"time to first token, prompt of {load.prompt} tokens", f"{took * 1e3:.3g} ms")
    for batch in load.batches:
        step, result = measure_steps(engine, sizes, load, batch, GREEDY)
        rates[batch] = batch / step
        yield result
    _, result = measure_steps(engine, sizes, load, load.sampled_batch, SAMPLED)
    yield Result(f"{result.name}, sampled", result.value)


def make_engine(model: Decoder, sizes: Sizes, load: Load) -> DynamicInferenceEngine:
    """With graphs of all sizes, and a cache that the largest batch fits."""
    blocks = max(load.batches) * -(-load.length // sizes.page)
    tokenizer = Tokenizer(byte_backend(), location="bytes", eod=END)
    settings = InferenceConfig(
        kv_cache_memory_bytes=blocks * KVCache.block_bytes(model.config, sizes.page, model.dtype),
        block_size_tokens=sizes.page,
        max_requests=max(load.batches),
        num_cuda_graphs=-1,
        cuda_graph_max_tokens=sizes.graph_tokens,
    )
    return DynamicInferenceEngine.build(model, tokenizer, settings)


def add_requests(engine: DynamicInferenceEngine, prompts: list[list[int]], load: Load, params: dict[str, Any]) -> None:
    """Which do not end by themselves; their ids are 0, 1, ..."""
    given = params | {"ignore_eos": True, "num_tokens_to_generate": load.length - load.prompt}
    for number, prompt in enumerate(prompts):
        engine.add_request(number, prompt, SamplingParams(**given, seed=number))


def abort_requests(engine: DynamicInferenceEngine, count: int) -> None:
    """All of them."""
    for number in range(count):
        engine.abort_request(number)
    engine.pop_reports()


def first_token_seconds(engine: DynamicInferenceEngine, sizes: Sizes, load: Load) -> float:
    """From a request to an idle engine to its first token: the median of several, after a warm-up."""
    found = []
    for prompt in random_prompts(WARM_UP_STEPS + sizes.repeats, load.prompt, sizes.vocabulary):
        wait(sizes)
        started = time.perf_counter()
        add_requests(engine, [prompt], load, GREEDY)
        engine.step_modern()
        found.append(time.perf_counter() - started)
        assert len(engine.get_request(0).generated_tokens) == 1, "a step computes the prompt, and samples"
        abort_requests(engine, 1)
    return statistics.median(found[WARM_UP_STEPS:])


def measure_steps(
    engine: DynamicInferenceEngine, sizes: Sizes, load: Load, batch: int, params: dict[str, Any]
) -> tuple[float, Result]:
    """The median of the seconds of steps without prompts, and what it is beside the graphs on the GPU."""
    step = timed_steps(engine, sizes, load, batch, params)
    alone = graph_seconds(engine, sizes)
    abort_requests(engine, batch)
    words = f"{step * 1e3:.4g} ms, {(step - alone) * 1e3:.2g} ms beside the graphs (target {TARGET * 1e3:g})"
    return step, Result(f"engine step, batch {batch}", f"{words}, {batch / step:.4g} tokens/s")


def timed_steps(
    engine: DynamicInferenceEngine,
    sizes: Sizes,
    load: Load,
    batch: int,
    params: dict[str, Any],
    *,
    captured: bool = True,
) -> float:
    """The median of the seconds of steps without prompts, of requests that go on."""
    add_requests(engine, random_prompts(batch, load.prompt, sizes.vocabulary), load, params)
    while not all(engine.get_request(number).generated_tokens for number in range(batch)):
        engine.step_modern()
    for _ in range(WARM_UP_STEPS):
        engine.step_modern()
    gc.collect()
    found = []
    for _ in range(load.steps):
        started = time.perf_counter()
        result = engine.step_modern()
        found.append(time.perf_counter() - started)
        assert len(result["active_request_ids"]) == batch, "no request ends or waits"
        assert not captured or result["cuda_graph_request_count"] is not None, "a step without prompts runs on a graph"
    return statistics.median(found)


@torch.inference_mode()
def graph_seconds(engine: DynamicInferenceEngine, sizes: Sizes) -> float:
    """Of the graphs of one more step on the GPU: several replays in a row, so that the host's launches are hidden. They
    write what the step has written."""
    replayed: list[torch.cuda.CUDAGraph] = []
    replay = torch.cuda.CUDAGraph.replay

    def noted(graph: torch.cuda.CUDAGraph) -> None:
        replayed.append(graph)
        replay(graph)

    with patch.object(torch.cuda.CUDAGraph, "replay", noted):
        engine.step_modern()
    assert len(replayed) == GRAPHS_OF_STEP
    wait(sizes)
    started = time.perf_counter()
    for graph in replayed * sizes.repeats:
        graph.replay()
    wait(sizes)
    return (time.perf_counter() - started) / sizes.repeats
