"""The memory of a suspended engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from runtime_support.byte_backend import END, byte_backend

from gpu_checks.correctness import same_tokens
from gpu_checks.random_models import random_model, weight_bytes
from gpu_checks.results import DEVICE, Check, Result, Sizes
from megatron_runtime.config import InferenceConfig, KVCacheManagementMode
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.gpu import driver_memory
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

NEEDED = 0.95
LAYERS = 4
"""Of the model whose weights are released: enough to be seen beside what a GPU needs for other purposes."""
TOKENS = 12
BEFORE = 5
"""Tokens before the suspension."""


def checks(sizes: Sizes) -> Iterator[Check]:
    """Of an engine that releases weights and cache, but not their addresses."""
    yield "suspension that keeps CUDA graphs", partial(check_addresses, sizes)


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


def make_engine(model: Decoder, sizes: Sizes, **options: object) -> DynamicInferenceEngine:
    """With the cache of these sizes."""
    settings = InferenceConfig(
        kv_cache_memory_bytes=sizes.cache_bytes,
        max_sequence_length=sizes.model["max_position_embeddings"],
        **options,  # type: ignore[arg-type]
    )
    return DynamicInferenceEngine.build(model, Tokenizer(byte_backend(), location="bytes", eod=END), settings)


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
