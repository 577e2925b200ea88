"""The time of an engine's steps with prompts, as CUDA graphs and eagerly."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from functools import partial

import torch
from runtime_support.byte_backend import END, byte_backend

from gpu_checks.random_models import random_model
from gpu_checks.results import Check, Result, Sizes
from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

TOKEN = 65
STEPS_BEFORE = 4
"""In which the prompts of the other requests are computed."""


def checks(sizes: Sizes) -> Iterator[Check]:
    """With a model of their own."""
    yield "steps with prompts", partial(measure, sizes)


def measure(sizes: Sizes) -> Iterator[Result]:
    """Each kind of step."""
    model, times = random_model(sizes), []
    for num_cuda_graphs in (-1, 0):
        if sizes.has_gpu:
            torch.cuda.empty_cache()
        engine = make_engine(model, sizes, num_cuda_graphs)
        times.append(dict(steps(engine, sizes)))
        del engine
    for name, (took, is_graph) in times[0].items():
        eager, is_wrong = times[1][name][0], not is_graph
        yield Result(name, f"{took * 1e3:.3g} ms ({eager * 1e3:.3g} ms eagerly)", "a graph", is_wrong=is_wrong)


def steps(engine: DynamicInferenceEngine, sizes: Sizes) -> Iterator[tuple[str, tuple[float, bool]]]:
    """By the names of steps: seconds, and whether all of them were graphs.

    A step ends when the host has its tokens. The requests whose prompts are measured end in their first step.
    """
    numbers = itertools.count()

    def add(tokens: int, answer: int) -> None:
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=answer, ignore_eos=True)
        engine.add_request(next(numbers), [TOKEN] * tokens, params)

    def timed(tokens: int) -> tuple[float, bool]:
        are_graphs, found = [], []
        for _ in range(1 + sizes.repeats):
            engine.barrier("no other pass has begun")
            add(tokens, 1)
            started = time.perf_counter()
            are_graphs.append(engine.step_modern()["cuda_graph_request_count"] is not None)
            found.append(time.perf_counter() - started)
        return min(found[1:]), all(are_graphs)

    yield f"step, prompt of {sizes.step_prompt} tokens", timed(sizes.step_prompt)
    for _ in range(sizes.step_requests):
        add(sizes.contexts[0], length_of(sizes) - sizes.contexts[0])
    for _ in range(STEPS_BEFORE):
        engine.step_modern()
    others = f"{sizes.step_requests} requests of context {sizes.contexts[0]}"
    yield f"step, prompt of {sizes.step_slice} tokens beside {others}", timed(sizes.step_slice)


def length_of(sizes: Sizes) -> int:
    """Of the other requests, with answers that do not end before the measurement."""
    return sizes.contexts[0] + STEPS_BEFORE + sizes.repeats + 2


def make_engine(model: Decoder, sizes: Sizes, num_cuda_graphs: int) -> DynamicInferenceEngine:
    """With room for these requests, and for the longest one of the model, on which the launches depend."""
    length = model.config.max_position_embeddings
    others = (sizes.step_requests + 1) * -(-max(length_of(sizes), sizes.step_prompt + 1) // sizes.page)
    blocks = max(others, -(-length // sizes.page))
    settings = InferenceConfig(
        kv_cache_memory_bytes=blocks * KVCache.block_bytes(model.config, sizes.page, model.dtype),
        block_size_tokens=sizes.page,
        max_sequence_length=length,
        max_requests=sizes.max_requests,
        cuda_graph_max_tokens=sizes.graph_tokens,
        num_cuda_graphs=num_cuda_graphs,
    )
    return DynamicInferenceEngine.build(model, Tokenizer(byte_backend(), location="bytes", eod=END), settings)
