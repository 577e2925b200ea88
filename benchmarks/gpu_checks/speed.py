"""The speed of this device, and of passes of a model with random weights as shares of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gpu_checks import latent_attention, memory
from gpu_checks.random_models import bytes_read, random_model
from gpu_checks.results import DEVICE, Check, Result, Sizes
from megatron_runtime.gpu.graphs import GraphRecorder
from megatron_runtime.gpu.sampling import row_max
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.forward_batch import ForwardBatch
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.products import fix_rows

SHARE_OF_FREE_MEMORY = 0.8


def checks(sizes: Sizes) -> Iterator[Check]:
    """With one model, and of attention to latents alone."""
    yield "speed of attention to latents", partial(latent_attention.measure, sizes, seconds)
    yield "memory and speed", partial(measure, sizes)


@torch.inference_mode()
def measure(sizes: Sizes) -> Iterator[Result]:
    """Ceilings, the memory of a suspended engine, a prefill, and decode passes."""
    bandwidth, flops = copied_bytes_per_second(sizes), products_per_second(sizes)
    yield Result("ceiling: copy", f"{bandwidth / 1e9:.3g} GB/s read and written")
    yield Result("ceiling: matrix product", f"{flops / 1e12:.3g} TFLOP/s")
    model = random_model(sizes)
    weights = bytes_read(model)
    yield memory.check_suspended(model, sizes)
    yield prefill(model, sizes, weights, flops)
    for context in sizes.contexts:
        for requests in sizes.batches:
            yield decode(model, sizes, requests, context, weights, bandwidth)
    fix_rows(model)
    for result in (
        prefill(model, sizes, weights, flops),
        *(decode(model, sizes, requests, sizes.contexts[0], weights, bandwidth) for requests in sizes.batches),
    ):
        yield replace(result, name=f"batch-invariant: {result.name}")


def seconds(work: Callable[[], object], sizes: Sizes) -> float:
    """Of one call, the fastest of several after a warm-up."""
    work()
    found = []
    for _ in range(sizes.repeats):
        wait(sizes)
        start = time.perf_counter()
        work()
        wait(sizes)
        found.append(time.perf_counter() - start)
    return min(found)


def wait(sizes: Sizes) -> None:
    """Until the device has done all."""
    if sizes.has_gpu:
        torch.cuda.synchronize(DEVICE)


def copied_bytes_per_second(sizes: Sizes) -> float:
    """Bytes that a copy reads and writes."""
    source = torch.empty(sizes.copied_bytes, dtype=torch.uint8, device=DEVICE).random_()  # zeros take less power
    target = torch.empty_like(source)
    return 2 * sizes.copied_bytes / seconds(lambda: target.copy_(source), sizes)


def products_per_second(sizes: Sizes) -> float:
    """Additions and multiplications of a product of square matrices."""
    one = torch.randn(sizes.matrix, sizes.matrix, dtype=sizes.dtype, device=DEVICE)  # of ones, it is a tenth faster
    return 2 * sizes.matrix**3 / seconds(lambda: one @ one, sizes)


def decode(
    model: Decoder,
    sizes: Sizes,
    requests: int,
    context: int,
    weights: int,
    bandwidth: float,
    cached: torch.dtype | None = None,
) -> Result:
    """A pass of single tokens, with greedy sampling, as a CUDA graph; the floor reads weights and cache once.
    ``cached`` is the type of keys and values, None: that of the weights."""
    name = f"decode, batch {requests}, context {context}"
    blocks = -(-context // sizes.page)
    cache_bytes = KVCache.block_bytes(model.config, sizes.page, cached or sizes.dtype) * blocks * requests
    if sizes.has_gpu:
        torch.cuda.empty_cache()
    if sizes.has_gpu and cache_bytes > SHARE_OF_FREE_MEMORY * torch.cuda.mem_get_info(DEVICE)[0]:
        return Result(name, f"not measured: the cache has {cache_bytes / 1e9:.0f} GB")
    batch, cache = (
        batch_of(sizes, requests, context, 1),
        KVCache(model.config, blocks * requests, sizes.page, cached or sizes.dtype, DEVICE),
    )

    def work() -> None:
        row_max(logits_of(model, batch, cache))

    eager = seconds(work, sizes)
    took = seconds(GraphRecorder(DEVICE).record(work).replay, sizes)
    # A copy reads and writes each byte, so reading alone takes half of its bytes at this rate, or more.
    floor = (weights + cache_bytes) / bandwidth
    words = f"{took * 1e3:.3g} ms ({eager * 1e3:.3g} ms eagerly), {requests / took:.4g} tokens/s"
    return Result(name, f"{words}, {floor / took:.0%} of the floor")


def prefill(model: Decoder, sizes: Sizes, weights: int, flops: float, cached: torch.dtype | None = None) -> Result:
    """One prompt; only the products with weights are counted."""
    blocks = -(-sizes.prompt // sizes.page)
    batch = batch_of(sizes, 1, sizes.prompt, sizes.prompt)
    cache = KVCache(model.config, blocks, sizes.page, cached or sizes.dtype, DEVICE)
    took = seconds(lambda: logits_of(model, batch, cache), sizes)
    rate = 2 * weights / sizes.dtype.itemsize * sizes.prompt / took
    words = f"{took * 1e3:.4g} ms, {sizes.prompt / took:.4g} tokens/s, {rate / flops:.0%} of the ceiling"
    return Result(f"prefill of {sizes.prompt} tokens", words)


def logits_of(model: Decoder, batch: ForwardBatch, cache: KVCache) -> Tensor:
    """Of the last token of each request."""
    logits = model(batch, cache)
    assert isinstance(logits, Tensor)
    return logits


def batch_of(sizes: Sizes, requests: int, context: int, new: int) -> ForwardBatch:
    """The last ``new`` tokens of each of some contexts, which have blocks of their own."""
    blocks = -(-context // sizes.page)
    tables = torch.arange(requests * blocks, dtype=torch.int32).view(requests, blocks)
    positions = torch.arange(context - new, context)
    slots = tables[:, positions // sizes.page].long() * sizes.page + positions % sizes.page
    parts = {
        "tokens": torch.randint(0, sizes.vocabulary, (requests * new,), generator=torch.Generator().manual_seed(3)),
        "positions": positions.repeat(requests),
        "slots": slots.flatten(),
        "query_starts": torch.arange(0, requests * new + 1, new, dtype=torch.int32),
        "context_lengths": torch.full((requests,), context, dtype=torch.int32),
        "block_tables": tables,
        "logit_rows": torch.arange(1, requests + 1) * new - 1,
    }
    return ForwardBatch(**{name: values.to(DEVICE) for name, values in parts.items()})
