"""The merge of the results of single queries over splits of their contexts, as `attend_splits` writes them."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_runtime.gpu.attention_kernels import LOG2_E, first_key, split_length


@triton.jit
def splits_of(context, window, SPLIT: tl.constexpr, MOST_SPLITS: tl.constexpr, WINDOWED: tl.constexpr,
              CHUNKED: tl.constexpr):  # fmt: skip
    """The first split that the last token of a context sees, and the one after the last."""
    length = split_length(context, SPLIT, MOST_SPLITS)
    begin = 0 * context
    if WINDOWED:
        begin = first_key(context - 1, window, CHUNKED) // length
    return begin, (context + length - 1) // length


@triton.jit
def merge_step(state, log_sum, mean):
    """Add a split, the logarithm of its sum of weights and its mean, to the largest logarithm, the sum and the weighted
    sum of means of each row.

    The multiplications and additions are fused explicitly, so that the bits are the same in every kernel. A split with
    a logarithm of minus infinity and a mean of 0 changes nothing.
    """
    top, total, summed = state
    highest = tl.maximum(top, log_sum)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    kept, weight = tl.exp2(top - base), tl.exp2(log_sum - base)
    return highest, tl.fma(total, kept, weight), tl.fma(summed, kept[:, None], mean * weight[:, None])


@triton.jit(do_not_specialize=["window", "num_splits"])
def merge_splits(
    output, partial, log_sums, sinks, query_starts, context_lengths, window, num_splits,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr, WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The outputs of `attend_splits`, in the order of the splits. Grid: [requests, HEADS]."""
    request = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(query_starts + request)
    if tl.load(query_starts + request + 1) - start != 1:
        return
    context = tl.load(context_lengths + request)
    begin, end = splits_of(context, window, SPLIT, MOST_SPLITS, WINDOWED, CHUNKED)
    channel = tl.arange(0, WIDTH_PAD)
    first = (request.to(tl.int64) * HEADS + head) * num_splits
    top = tl.full([1], 0.0 if HAS_SINKS else float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    if HAS_SINKS:
        top += tl.load(sinks + head) * LOG2_E
        total += 1.0
    state = top, total, tl.zeros([1, WIDTH_PAD], tl.float32)
    for split in range(begin, end):
        log_sum = tl.load(log_sums + first + split + tl.zeros([1], tl.int32))
        mean = tl.load(partial + (first + split) * WIDTH + channel, mask=channel < WIDTH, other=0.0)
        state = merge_step(state, log_sum, mean[None, :])
    _, total, summed = state
    address = (start.to(tl.int64) * HEADS + head) * WIDTH + channel
    result = (summed / total[:, None]).to(output.dtype.element_ty)
    tl.store(output + address[None, :], result, mask=(channel < WIDTH)[None, :])
