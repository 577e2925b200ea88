"""Keys and values in fp8: whether attention computes the right thing, and the speed of passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from gpu_support.attention_shapes import SHAPES
from gpu_support.float8_cache import RoundedAttention, in_float8, widened
from gpu_support.paged import PagedCase

from gpu_checks.correctness import (
    ATTENTION,
    SAMPLERS,
    compared,
    generate,
    on_device,
    same_bits,
    same_tokens,
    small_model,
)
from gpu_checks.random_models import bytes_read, random_model
from gpu_checks.results import DEVICE, Check, Result, Sizes, free_memory
from gpu_checks.speed import copied_bytes_per_second, decode, prefill, products_per_second
from megatron_runtime.model.kv_cache import FLOAT8

FP8 = {"kv_cache_dtype": "fp8"}


def checks(sizes: Sizes) -> Iterator[Check]:
    """Kernels, bits and engine."""
    for dtype in sizes.dtypes:
        yield f"attention, fp8 cache, {dtype}", partial(check_attention, dtype)
    yield "bits of a request, fp8 cache", partial(check_bits, sizes)
    yield "engine's tokens, fp8 cache", partial(check_engine, sizes)


def measurements(sizes: Sizes) -> Iterator[Check]:
    """With one model."""
    yield "speed with an fp8 cache", partial(measure, sizes)


def check_attention(dtype: torch.dtype) -> Iterator[Result]:
    """Against float64, from what the cache has after the new keys and values are written."""
    for name in ATTENTION:
        shape = SHAPES[name]
        case = in_float8(shape.case(dtype))
        there = case.on(DEVICE)
        found = there.attend(*shape.limits(DEVICE))
        stored = widened(replace(case, cache=(there.cache[0].cpu(), there.cache[1].cpu())))
        yield compared(f"attention, fp8 cache: {name}", found, stored.expected(*shape.limits()), dtype)


def check_bits(sizes: Sizes) -> Iterator[Result]:
    """A single token alone, beside a longer context, and beside a prompt."""
    alone = PagedCase.random(((90, 1),), (4, 2), 64, 16, sizes.dtypes[-1])
    others = [PagedCase.random(((90, 1), other), (4, 2), 64, 16, sizes.dtypes[-1]) for other in ((321, 1), (7, 7))]
    cases = (in_float8(case.with_first_of(alone)) for case in (alone, *others))
    bits = [case.on(DEVICE).attend(None, None)[:1].cpu() for case in cases]
    yield same_bits("bits of a request in other batches, fp8 cache", bits)


def check_engine(sizes: Sizes) -> Iterator[Result]:
    """Its tokens in float32 against those of the CPU with rounded keys and values."""
    model = small_model()
    planned = "megatron_runtime.model.decoder.plan_attention"
    with patch(planned, lambda batch, cache, _: RoundedAttention(batch, cache.block_size_tokens)):
        expected = generate(model, SAMPLERS["greedy"])
    for kind, num_cuda_graphs in (("graphs", 1), ("eager", 0))[: 2 if sizes.has_gpu else 1]:
        found = generate(on_device(model), SAMPLERS["greedy"], num_cuda_graphs, **FP8)
        yield same_tokens(f"engine's tokens, fp8 cache, {kind}", found, expected)


@torch.inference_mode()
def measure(sizes: Sizes) -> Iterator[Result]:
    """A prefill and decode passes."""
    free_memory(has_gpu=sizes.has_gpu)
    bandwidth, flops = copied_bytes_per_second(sizes), products_per_second(sizes)
    model = random_model(sizes)
    weights = bytes_read(model)
    results = [prefill(model, sizes, weights, flops, FLOAT8)]
    for context in sizes.contexts:
        batches = sizes.batches if sizes.has_gpu else sizes.batches[:1]
        results += [decode(model, sizes, requests, context, weights, bandwidth, FLOAT8) for requests in batches]
    for result in results:
        yield replace(result, name=f"fp8 cache: {result.name}")
