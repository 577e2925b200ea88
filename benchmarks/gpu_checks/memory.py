"""The memory of a suspended engine, and what the largest pass leaves for a KV cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import Mock, patch

import torch
from runtime_support.byte_backend import END, byte_backend

from gpu_checks.correctness import same_tokens
from gpu_checks.random_models import random_model, weight_bytes
from gpu_checks.results import DEVICE, Check, Result, Sizes, free_memory
from megatron_runtime.config import InferenceConfig, KVCacheManagementMode
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.largest_pass import measure_kv_cache_memory
from megatron_runtime.engine.text_generation_controller import TextGenerationController
from megatron_runtime.gpu import driver_memory
from megatron_runtime.inference_request import Status
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

TOKENIZER = Tokenizer(byte_backend(), location="bytes", eod=END)
NEEDED = 0.95
LAYERS = 4
"""Of the model whose weights are released: enough to be seen beside what a GPU needs for other purposes."""
TOKENS = 12
BEFORE = 5
"""Tokens before the suspension."""


def checks(sizes: Sizes) -> Iterator[Check]:
    """Of an engine that releases weights and cache, but not their addresses, and of one that fills the GPU."""
    yield "suspension that keeps CUDA graphs", partial(check_addresses, sizes)
    yield "largest pass", partial(check_largest_pass, sizes)


def check_suspended(model: Decoder, sizes: Sizes) -> Result:
    """The share of the KV cache that the driver has back after `suspend`, and that is allocated after `resume`."""
    engine = make_engine(model, sizes, kv_cache_management_mode=KVCacheManagementMode.OFFLOAD)
    size = engine.context.kv_cache.num_bytes
    assert size > sizes.cache_bytes / 2, f"a cache of {size} bytes shows nothing"
    return suspended(engine, size, "KV cache given back on suspend", sizes)


@torch.inference_mode()
def check_addresses(sizes: Sizes) -> Iterator[Result]:
    """Tokens around a suspension, with the graphs and the addresses of before, and the memory meanwhile."""
    model = random_model(sizes, num_layers=LAYERS)
    if (obstacle := driver_memory.obstacle(model.device)) is not None:
        yield Result("suspension: addresses", obstacle, "kept", is_wrong=True)
        return
    engine = make_engine(
        *(model, sizes),
        kv_cache_management_mode=KVCacheManagementMode.OFFLOAD,
        offload_weights=True,
        num_cuda_graphs=2,
        use_cuda_graphs_for_non_decode_steps=False,
        max_requests=2,
    )
    expected = generate(engine)
    graphs, before, captured = list(graphs_of(engine)), addresses(engine), engine.capture_stats
    size, results = weight_bytes(model) + engine.context.kv_cache.num_bytes, []

    def suspend() -> None:
        results.append(suspended(engine, size, "suspension: memory given back", sizes))

    found = generate(engine, suspend)
    yield from results
    moved = sum(one != other for one, other in zip(before, addresses(engine), strict=True))
    yield Result("suspension: addresses", f"{moved} of {len(before)} tensors moved", "0", is_wrong=moved > 0)
    kept = [*map(id, graphs)] == [*map(id, graphs_of(engine))] and engine.capture_stats is captured
    words = f"{len(graphs)} graphs {'kept' if kept else 'captured again'}"
    yield Result("suspension: CUDA graphs", words, "kept", is_wrong=not kept or not graphs)
    yield same_tokens("suspension: tokens", found, expected, "those without it")


def check_largest_pass(sizes: Sizes) -> Iterator[Result]:
    """One row, after which the GPU is free again."""
    free_memory(has_gpu=sizes.has_gpu)
    result = largest_pass(sizes)
    free_memory(has_gpu=sizes.has_gpu)
    yield result


@torch.inference_mode()
def largest_pass(sizes: Sizes) -> Result:
    """An engine as that of a rank whose KV cache has no given size, and requests that fill a pass beside it."""
    model, tokens = random_model(sizes, num_layers=2 * LAYERS), sizes.max_requests * sizes.filling_prompt
    config = InferenceConfig(
        max_requests=sizes.max_requests,
        max_tokens=tokens,
        max_sequence_length=sizes.model["max_position_embeddings"],
        num_cuda_graphs=-1 if sizes.has_gpu else 1,
        use_cuda_graphs_for_non_decode_steps=sizes.has_gpu,
        cuda_graph_max_tokens=sizes.graph_tokens,
    )
    with readings(sizes):
        size = measure_kv_cache_memory(TextGenerationController(model, TOKENIZER), config)
        engine = DynamicInferenceEngine.build(model, TOKENIZER, replace(config, kv_cache_memory_bytes=size))
        with patch.object(engine.controller, "run", wraps=engine.controller.run) as run:
            failed = fill_pass(engine, sizes)
        left, _ = torch.cuda.mem_get_info(DEVICE)
    largest = max((len(call.args[0].tokens) for call in run.call_args_list), default=0)
    sizes_of_cache = f"{size / 1e9:.3g} GB measured, {engine.context.kv_cache.num_bytes / 1e9:.3g} GB allocated"
    seen = f"{failed} of {sizes.max_requests} requests failed, a pass of {largest} tokens left {left / 1e9:.3g} GB"
    words, limit = f"{sizes_of_cache}; {seen}", f"none fails, {tokens} tokens"
    return Result("largest pass: KV cache", words, limit, is_wrong=failed > 0 or largest < tokens)


def fill_pass(engine: DynamicInferenceEngine, sizes: Sizes) -> int:
    """The failed ones of as many requests as an engine has at most, all of whose prompts are one pass; the sampling
    is that of the measured pass."""
    params = SamplingParams(
        top_p=0.999, num_tokens_to_generate=2, ignore_eos=True, return_log_probs=True, top_n_logprobs=20
    )
    params.skip_prompt_log_probs = True
    prompts = [[1 + at % (END - 1)] * sizes.filling_prompt for at in range(sizes.max_requests)]
    records = engine.generate(prompts, params)
    return sum(record.merge().status is not Status.COMPLETED for record in records)


def readings(sizes: Sizes) -> AbstractContextManager[object]:
    """The memory as the driver and PyTorch report it; without a GPU, numbers that say nothing."""
    if sizes.has_gpu:
        return nullcontext()
    fixed = {"memory_allocated": 0, "max_memory_allocated": sizes.cache_bytes, "reset_peak_memory_stats": None}
    fixed["mem_get_info"] = (3 * sizes.cache_bytes, 4 * sizes.cache_bytes)
    return patch.multiple(torch.cuda, **{name: Mock(return_value=value) for name, value in fixed.items()})


def make_engine(model: Decoder, sizes: Sizes, **options: object) -> DynamicInferenceEngine:
    """With the cache of these sizes."""
    settings = InferenceConfig(
        kv_cache_memory_bytes=sizes.cache_bytes,
        max_sequence_length=sizes.model["max_position_embeddings"],
        **options,  # type: ignore[arg-type]
    )
    return DynamicInferenceEngine.build(model, TOKENIZER, settings)


def generate(engine: DynamicInferenceEngine, between: Callable[[], None] = lambda: None) -> list[list[int]]:
    """Tokens of two requests; ``between`` is called once both have some."""
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=TOKENS, ignore_eos=True)
    futures = [engine.add_request(at, [65 + at] * (7 + 9 * at), params) for at in range(2)]
    steps = 0
    while engine.has_unfinished_requests():
        engine.step_modern()
        steps += 1
        if steps == BEFORE:
            between()
    return [future.result(timeout=0).merge().generated_tokens for future in futures]


def graphs_of(engine: DynamicInferenceEngine) -> Iterator[torch.cuda.CUDAGraph]:
    """Those of the model."""
    graphs = engine._memory.graphs
    assert graphs is not None
    yield from graphs._graphs.values()


def addresses(engine: DynamicInferenceEngine) -> list[int]:
    """Of all arrays of the cache and all weights."""
    cache, model = engine.context.kv_cache, engine.controller.model
    arrays = [array for layer in range(model.config.num_layers) for array in cache.layer(layer)]
    return [each.data_ptr() for each in (*arrays, *model.parameters(), *model.buffers())]


def suspended(engine: DynamicInferenceEngine, size: int, name: str, sizes: Sizes) -> Result:
    """Suspend and resume: the shares of ``size`` bytes that the driver has meanwhile, and that are taken again."""
    before, begun = free_bytes(sizes), time.perf_counter()
    engine.suspend()
    middle = time.perf_counter()
    meanwhile, later = free_bytes(sizes), time.perf_counter()
    engine.resume()
    seconds = f"suspend {middle - begun:.2g} s, resume {time.perf_counter() - later:.2g} s"
    given_back, taken = meanwhile - before, meanwhile - free_bytes(sizes)
    words = f"{given_back / size:.1%} of {size / 1e9:.3g} GB, {taken / size:.1%} taken again; {seconds}"
    return Result(name, words, f"{NEEDED:.0%}", is_wrong=min(given_back, taken) < NEEDED * size)


def free_bytes(sizes: Sizes) -> int:
    """Of the GPU, as its driver reports it; without a GPU, less than nothing: what the pretended driver has given."""
    if not sizes.has_gpu:
        return -int(driver_memory.import_driver().used)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(DEVICE)
    return free
