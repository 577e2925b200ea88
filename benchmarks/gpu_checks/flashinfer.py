"""FlashInfer's attention with float64, and its time beside that of this project's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from gpu_support.attention_shapes import SHAPES
from torch import Tensor

from gpu_checks.correctness import ATTENTION, compared
from gpu_checks.results import DEVICE, Check, Result, Sizes
from gpu_checks.speed import seconds
from megatron_runtime.gpu.attention import PagedBatch, attend
from megatron_runtime.gpu.flashinfer_attention import DTYPES, PACKAGE, WIDTHS, FlashInfer, FlashInferPass, PassTables

HEADS, KV_HEADS, WIDTH = 32, 8, 128
"""Of a Llama-3.1-8B."""
MOST_REQUESTS = 64

Attention = Callable[[], Tensor]


def checks(sizes: Sizes) -> Iterator[Check]:
    """Results, and times beside ours."""
    yield "flashinfer", partial(_or_why_not, partial(check_results, sizes))
    yield "flashinfer, speed", partial(_or_why_not, partial(measure, sizes))


def _or_why_not(check: Callable[[], Iterator[Result]]) -> Iterator[Result]:
    try:
        FlashInfer(DEVICE)
    except ImportError as error:
        yield Result("flashinfer", f"not measured: {PACKAGE} can't be imported ({error})")
        return
    yield from check()


def check_results(sizes: Sizes) -> Iterator[Result]:
    """Against float64."""
    for dtype in (each for each in sizes.dtypes if each in DTYPES):
        for name in (each for each in ATTENTION if SHAPES[each].width in WIDTHS):
            shape = SHAPES[name]
            case = shape.case(dtype)
            there = case.on(DEVICE)
            contexts = torch.tensor([length for length, _ in shape.lengths], dtype=torch.int32)
            batch = PagedBatch(there.slots, there.query_starts, contexts.to(DEVICE), there.tables)
            attention = FlashInferPass(
                FlashInfer(DEVICE), batch, PassTables.of(case.query_starts, contexts, case.tables, shape.page)
            )
            found = attention.attend(there.heads, there.rotation, there.cache, shape.window, shape.soft_cap)
            cache = (there.cache[0].cpu(), there.cache[1].cpu())
            expected = replace(case, cache=cache).expected(*shape.limits())
            yield compared(f"flashinfer: {name}", found, expected, dtype)


@torch.inference_mode()
def measure(sizes: Sizes) -> Iterator[Result]:
    """One layer eagerly, in alternation with the kernels of this project: single tokens, and a prompt."""
    requests = min(sizes.batches[-1], MOST_REQUESTS)
    for count, context, new in ((requests, sizes.contexts[-1], 1), (1, sizes.prompt, sizes.prompt)):
        theirs, ours = work_of(sizes, count, context, new)
        found = [(seconds(theirs, sizes), seconds(ours, sizes)) for _ in range(2)]
        taken, own = (min(times) for times in zip(*found, strict=True))
        words = f"{taken * 1e6:.4g} us, this project's kernels {own * 1e6:.4g} us"
        kind = f"batch {count}, context {context}" if new == 1 else f"prompt of {new} tokens"
        yield Result(f"flashinfer: {kind}", words)


def work_of(sizes: Sizes, requests: int, context: int, new: int) -> tuple[Attention, Attention]:
    """The attention of the last ``new`` tokens of each of some contexts, by FlashInfer, planned before, and by ours."""
    blocks = -(-context // sizes.page)
    options = {"dtype": sizes.dtype, "device": DEVICE}
    cache = torch.randn(2, requests * blocks, KV_HEADS, sizes.page, WIDTH, **options)
    pair = (cache[0], cache[1])
    heads = torch.randn(requests * new, HEADS + 2 * KV_HEADS, WIDTH, **options)
    tables = torch.arange(requests * blocks, dtype=torch.int32).view(requests, blocks)
    places = torch.arange(context - new, context)
    slots = tables[:, places // sizes.page].long() * sizes.page + places % sizes.page
    starts = torch.arange(0, requests * new + 1, new, dtype=torch.int32)
    contexts = torch.full((requests,), context, dtype=torch.int32)
    batch = PagedBatch(slots.flatten().to(DEVICE), *(each.to(DEVICE) for each in (starts, contexts, tables)))
    planned = FlashInferPass(FlashInfer(DEVICE), batch, PassTables.of(starts, contexts, tables, sizes.page))
    return (
        lambda: planned.attend(heads, None, pair, None, None),
        lambda: attend(heads, None, pair, batch, None, None),
    )
