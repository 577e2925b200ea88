"""Penalties for the tokens of running sequences, whose counts are updated here from the tokens of each pass."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def penalized(logit, count, repetition, frequency, presence):
    """Logits, float32, of tokens that occur in a sequence, ``count`` times in its answer.

    The penalties of the answer are added in float64 and rounded once, as on the host.
    """
    scaled = tl.where(logit > 0.0, tl.div_rn(logit, repetition), logit * repetition)
    penalty = (presence + frequency * count.to(tl.float64)).to(tl.float32)
    return tl.where(count > 0, scaled - penalty, scaled)


@triton.jit(do_not_specialize=["logits_stride", "count"])
def penalize_counted(
    logits, sampled, numbers, factors, lists, sizes, logits_stride, count, capacity, BLOCK: tl.constexpr
):  # fmt: skip
    """Count the last token of each sequence, and penalize the logits after it. Grid: [count].

    A sequence has a row of ``lists``, int32 [rows, capacity, 2], whose first ``sizes`` entries are its distinct tokens
    and how often the answer has each of them. ``numbers``, int32 [4, count]:

    * the row, negative where nothing is to be done;
    * the size of its list, negative if that is the one in ``sizes``;
    * the place of the last token in ``sampled``, negative if it is not there;
    * the last token otherwise, negative if none is to be counted.

    ``factors``, float64 [3, count], are the penalties: repetition, frequency and presence.
    """
    index = tl.program_id(0)
    row = tl.load(numbers + index)
    if row >= 0:
        known = tl.load(numbers + count + index)
        size = known if known >= 0 else tl.load(sizes + row)
        tl.debug_barrier()  # Every warp has the size before one of them changes it.
        source = tl.load(numbers + 2 * count + index)
        token = tl.load(numbers + 3 * count + index)
        if source >= 0:
            token = tl.load(sampled + source).to(tl.int32)
        repetition = tl.load(factors + index).to(tl.float32)
        frequency = tl.load(factors + count + index)
        presence = tl.load(factors + 2 * count + index)
        entries = lists + row.to(tl.int64) * capacity * 2
        row_logits = logits + index.to(tl.int64) * logits_stride
        is_listed = 0
        for first in range(0, size, BLOCK):
            at = first + tl.arange(0, BLOCK)
            exists = at < size
            listed = tl.load(entries + 2 * at, mask=exists, other=0)
            is_last = exists & (listed == token)
            times = tl.load(entries + 2 * at + 1, mask=exists, other=0) + is_last.to(tl.int32)
            tl.store(entries + 2 * at + 1, times, mask=is_last)
            is_listed += tl.sum(is_last.to(tl.int32), 0)
            old = tl.load(row_logits + listed, mask=exists, other=0.0)
            new = penalized(old, times, repetition, frequency, presence)
            tl.store(row_logits + listed, new, mask=exists)
        is_new = (token >= 0) & (is_listed == 0)
        if is_new:
            one = is_new.to(tl.int32)
            tl.store(entries + 2 * size, token)
            tl.store(entries + 2 * size + 1, one)
            old = tl.load(row_logits + token)
            tl.store(row_logits + token, penalized(old, one, repetition, frequency, presence))
        tl.store(sizes + row, size + is_new.to(tl.int32))
