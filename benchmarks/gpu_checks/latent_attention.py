"""The speed of attention to latents and of the products around it, with random values and the widths of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from gpu_checks.results import DEVICE, Result, Sizes
from megatron_runtime.gpu.attention import PagedBatch
from megatron_runtime.gpu.graphs import GraphRecorder
from megatron_runtime.gpu.latent_attention import LatentMatrices, attend_latents

HEADS = (16, 128)
"""Of a rank of eight, and of one alone."""
WIDTHS = (64, 512, 128, 128)
"""Channels that are rotated, of a latent, of a query besides, and of a value."""
NARROW = (8, 32, 16, 16)
"""The same in a dry run, for which the interpreter takes less time."""
MOST_REQUESTS = 64
MOST_TOKENS = 4096
"""Of a prompt, of which this many are measured, and of each context."""

Timer = Callable[[Callable[[], object], Sizes], float]
"""Seconds of a call."""


@torch.inference_mode()
def measure(sizes: Sizes, seconds: Timer) -> Iterator[Result]:
    """Of a layer: single tokens of several requests, on a CUDA graph, and a prompt."""
    requests, context = min(sizes.batches[-1], MOST_REQUESTS), min(sizes.contexts[-1], MOST_TOKENS)
    prompt = min(sizes.prompt, MOST_TOKENS)
    rotated, latent, plain, values = widths_of(sizes)
    for heads in HEADS:
        work, cache_bytes = work_of(sizes, heads, requests, context, 1)
        took = seconds(GraphRecorder(DEVICE).record(work).replay, sizes)
        words = f"{took * 1e6:.4g} us, {cache_bytes / took / 1e9:.4g} GB/s of the cache"
        yield Result(f"latents of {heads} heads: batch {requests}, context {context}", words)
        work, _ = work_of(sizes, heads, 1, prompt, prompt)
        took = seconds(work, sizes)
        products = heads * prompt * ((prompt + 1) * (rotated + 2 * latent) + 2 * latent * (plain + values))
        words = f"{took * 1e3:.4g} ms, {products / took / 1e12:.3g} TFLOP/s"
        yield Result(f"latents of {heads} heads: prompt of {prompt} tokens", words)


def widths_of(sizes: Sizes) -> tuple[int, int, int, int]:
    """As WIDTHS."""
    return WIDTHS if sizes.has_gpu else NARROW


def work_of(sizes: Sizes, heads: int, requests: int, context: int, new: int) -> tuple[Callable[[], None], int]:
    """The attention of the last ``new`` tokens of each of some contexts, and the bytes of its cache."""
    (rotated, latent, plain, values), blocks = widths_of(sizes), -(-context // sizes.page)
    options = {"dtype": sizes.dtype, "device": DEVICE}
    cache = torch.randn(requests * blocks, 1, sizes.page, rotated + latent, **options)
    queries = torch.randn(requests * new, heads, plain + rotated, **options)
    compressed = torch.randn(requests * new, latent + rotated, **options)
    up = torch.randn(heads, plain + values, latent, **options)
    matrices = LatentMatrices(up, (up[0, 0], 1e-6), 1.0, values, is_interleaved=True)
    tables = torch.arange(requests * blocks, dtype=torch.int32).view(requests, blocks)
    places = torch.arange(context - new, context)
    slots = tables[:, places // sizes.page].long() * sizes.page + places % sizes.page
    batch = PagedBatch(
        slots.flatten().to(DEVICE),
        torch.arange(0, requests * new + 1, new, dtype=torch.int32).to(DEVICE),
        torch.full((requests,), context, dtype=torch.int32).to(DEVICE),
        tables.to(DEVICE),
    )

    def work() -> None:
        attend_latents(queries, compressed, matrices, None, cache, batch, None, None)

    return work, cache.numel() * cache.element_size()
