"""Top-k, top-p and min-p, computed from as few of the most likely tokens as possible.

All filters work on logits over temperature: top-k first, then top-p on the probabilities of the tokens that top-k
keeps, then min-p relative to the most likely token. Each filter is a threshold. Tokens that equal the last kept token
are kept too, so the result depends on the row's logits alone and not on the order among equals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.engine.sampling.sampling_table import SamplingRules
from megatron_runtime.engine.sampling.top_k import top_k

_WIDTHS = (64, 512)
"""How many of the most likely tokens the first attempts rank; the last attempt takes the whole vocabulary."""
_NUMBERS_AT_ONCE = 1 << 20
"""Logits that are processed together, so that they stay in the processor's cache."""
_BUCKETS = 1024
_BUCKETS_PER_NAT = 32


@dataclass(frozen=True)
class TruncatedRows:
    """R rows after their filters."""

    rows: NDArray[np.intp]
    """[R], which rows of the logits these are."""
    columns: Tensor | None
    """int64 [R, W], the tokens; None if they are the whole vocabulary in order."""
    scaled: Tensor
    """float32 [R, W or vocab], logits over temperature less their maximum, -inf for excluded tokens."""


def truncate(logits: Tensor, top: Tensor, rules: SamplingRules, rows: NDArray[np.intp]) -> Iterator[TruncatedRows]:
    """Apply the filters to some rows, in groups that fit the cache.

    Args:
        logits: float32 [S, vocab].
        top: [S], the maxima.
        rules: One per row of the logits.
        rows: Rows of the logits, with finite maxima and temperatures above 0.
    """
    limited = rules.is_limited[rows]
    for group in _groups(rows[~limited], logits.shape[1]):
        yield TruncatedRows(group, None, _scaled(logits, top, rules, group))
    pending = rows[limited]
    normalizer = _normalizers(logits, top, rules, pending)
    for width in _WIDTHS:
        # Top-k says how many tokens it needs. How many top-p needs is unknown: one attempt with few, then all.
        worthwhile = (rules.top_k < width) & ((rules.top_k > 0) | (rules.has_nucleus & (width == _WIDTHS[0])))
        group = pending[worthwhile[pending]]
        if group.size and width < logits.shape[1]:
            found = _truncate_ranked(logits, top, normalizer, rules, group, width)
            yield found
            pending = pending[~np.isin(pending, found.rows)]
    for group in _groups(pending, logits.shape[1]):
        yield TruncatedRows(group, None, _filter(_scaled(logits, top, rules, group), rules.take(group)))


def _truncate_ranked(
    logits: Tensor, top: Tensor, normalizer: Tensor, rules: SamplingRules, rows: NDArray[np.intp], width: int
) -> TruncatedRows:
    """Those of the rows for which so many of the most likely tokens determine the result."""
    index = torch.from_numpy(rows).to(logits.device)
    part = rules.take(rows)
    values, columns = top_k(logits[index], width)
    scaled = (values - top[index, None]) / _column(part.temperature, logits)
    least = _threshold(scaled, normalizer[index, None], part)
    # Tokens that were not ranked are at most as likely as the last one that was.
    is_complete = (least > scaled[:, -1:]).squeeze(1)
    kept = torch.where(scaled < least, -torch.inf, scaled)
    return TruncatedRows(rows[is_complete.cpu().numpy()], columns[is_complete], kept[is_complete])


def _groups(rows: NDArray[np.intp], vocabulary: int) -> Iterator[NDArray[np.intp]]:
    size = max(1, _NUMBERS_AT_ONCE // vocabulary)
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _scaled(logits: Tensor, top: Tensor, rules: SamplingRules, rows: NDArray[np.intp]) -> Tensor:
    index = torch.from_numpy(rows).to(logits.device)
    # Subtracted first, so that no temperature makes the maximum overflow.
    return (logits[index] - top[index, None]).div_(_column(rules.temperature[rows], logits))


def _normalizers(logits: Tensor, top: Tensor, rules: SamplingRules, rows: NDArray[np.intp]) -> Tensor:
    """[S], the logarithm of the sum of exponentials over the vocabulary, for those of the rows that need it."""
    normalizer = torch.zeros_like(top)
    for part in _groups(rows[(rules.has_nucleus & (rules.top_k == 0))[rows]], logits.shape[1]):
        normalizer[torch.from_numpy(part).to(top.device)] = _scaled(logits, top, rules, part).logsumexp(dim=-1)
    return normalizer


def _threshold(scaled: Tensor, normalizer: Tensor, rules: SamplingRules) -> Tensor:
    """[R, 1], the lowest kept value, given the [R, W] most likely tokens; every top-k is below W."""
    least = torch.full_like(normalizer, -torch.inf)
    if (rules.top_k > 0).any():
        limited = _mask(rules.top_k > 0, scaled)
        last = torch.from_numpy(np.maximum(rules.top_k, 1).astype(np.int64) - 1).to(scaled.device)
        least = torch.where(limited, scaled.gather(1, last[:, None]), least)
        remaining = torch.where(scaled < least, -torch.inf, scaled).logsumexp(dim=-1, keepdim=True)
        normalizer = torch.where(limited, remaining, normalizer)
    if rules.has_nucleus.any():
        mass = torch.where(scaled < least, 0, (scaled - normalizer).exp_()).cumsum(dim=-1)
        last = (mass < _column(rules.top_p, scaled)).sum(dim=-1, keepdim=True).clamp_(max=scaled.shape[1] - 1)
        least = torch.where(_mask(rules.has_nucleus, scaled), torch.maximum(least, scaled.gather(1, last)), least)
    return torch.maximum(least, _column(rules.min_p, scaled).log())


def _filter(scaled: Tensor, rules: SamplingRules) -> Tensor:
    """Apply the filters to the whole vocabulary: [R, vocab]."""
    counted = np.flatnonzero(rules.top_k > 0)
    if counted.size:
        wanted = np.minimum(rules.top_k[counted], scaled.shape[1])
        scaled = _keep_until(scaled, counted, wanted, torch.ones_like)
    nucleus = np.flatnonzero(rules.has_nucleus)
    if nucleus.size:
        scaled = _keep_until(scaled, nucleus, rules.top_p[nucleus], lambda flat: flat.softmax(dim=-1))
    return torch.where(scaled < _column(rules.min_p, scaled).log(), -torch.inf, scaled)


def _keep_until(
    scaled: Tensor, rows: NDArray[np.intp], target: NDArray[Any], weigh: Callable[[Tensor], Tensor]
) -> Tensor:
    """[R, vocab] with only the most likely tokens of some rows whose weights together reach the rows' targets."""
    index = torch.from_numpy(rows).to(scaled.device)
    flat = scaled[index]
    scaled[index] = torch.where(flat < _reached(flat, weigh(flat), _column(target, flat)), -torch.inf, flat)
    return scaled


def _reached(scaled: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """[R, 1], the value at which the weights of the most likely tokens of [R, vocab] reach the target.

    The vocabulary is not sorted, but divided into buckets by value; only the bucket in which the sum reaches the target
    is sorted.
    """
    bucket = scaled.mul(-_BUCKETS_PER_NAT).clamp_(max=_BUCKETS - 1).long()
    masses = scaled.new_zeros(len(scaled), _BUCKETS).scatter_add_(1, bucket, weights).cumsum(dim=-1)
    reached = (masses < target).sum(dim=-1, keepdim=True).clamp_(max=_BUCKETS - 1)
    before = torch.where(reached > 0, masses.gather(1, (reached - 1).clamp(min=0)), 0)
    inside = bucket == reached
    width = max(1, int(inside.sum(dim=-1).max()))
    best, columns = top_k(torch.where(inside, scaled, -torch.inf), width)
    mass = weights.gather(1, columns).cumsum(dim=-1) + before
    found = inside.sum(dim=-1, keepdim=True)
    last = torch.minimum((mass < target).sum(dim=-1, keepdim=True), (found - 1).clamp(min=0))
    return best.gather(1, last)


def _mask(values: NDArray[np.bool_], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]


def _column(values: NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like)[:, None]
