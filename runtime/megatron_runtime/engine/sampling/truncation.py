"""Applies truncations such as top-k and top-p, with as few of the most likely tokens as possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_runtime.engine.sampling.filters.truncations import Truncation
from megatron_runtime.engine.sampling.kept_tokens import (
    AllTokens,
    KeptTokens,
    RankedTokens,
    ScaledLogits,
    exclude_below,
    row_groups,
)
from megatron_runtime.engine.sampling.sampling_table import SamplingRules

_WIDTHS = (64, 512)
"""Number of the most likely tokens that the first attempts rank; the last attempt ranks the whole vocabulary."""


@dataclass(frozen=True)
class TruncatedRows:
    """R rows after their truncations."""

    rows: NDArray[np.intp]
    """[R], their rows in the logits."""
    columns: Tensor | None
    """int64 [R, W], the tokens; None if they are the whole vocabulary in order."""
    scaled: Tensor
    """float32 [R, W or vocab], logits over temperature less their maximum, -inf for excluded tokens."""


def truncate(logits: Tensor, top: Tensor, rules: SamplingRules, rows: NDArray[np.intp]) -> Iterator[TruncatedRows]:
    """Truncate some rows, in groups whose logits fit into the cache.

    Args:
        logits: float32 [S, vocab].
        top: [S], the maxima.
        rules: One per row of the logits.
        rows: Rows of the logits, with finite maxima and temperatures above 0.
    """
    vocabulary = logits.shape[1]
    is_truncated = rules.is_truncated[rows]
    for group in row_groups(rows[~is_truncated], vocabulary):
        yield TruncatedRows(group, None, _scaled(logits, top, rules, group).all())
    pending = rows[is_truncated]
    for width in _WIDTHS:
        # Top-k determines the number of tokens to rank. Top-p does not: one attempt with few tokens, then all.
        worthwhile = (rules.most_kept < width) & ((rules.most_kept > 0) | (rules.ranks & (width == _WIDTHS[0])))
        group = pending[worthwhile[pending]]
        if group.size and width < vocabulary:
            found = _truncate_ranked(logits, top, rules, group, width)
            yield found
            pending = pending[~np.isin(pending, found.rows)]
    for group in row_groups(pending, vocabulary):
        yield _truncate_all(logits, top, rules, group)


def least_kept(logits: Tensor, top: Tensor, rules: SamplingRules, rows: NDArray[np.intp]) -> Tensor | None:
    """The lowest kept scaled logit of rows whose truncations rank no tokens: [R]; None if all tokens are kept."""
    if not rules.is_truncated[rows].any():
        return None
    kept = KeptTokens(_scaled(logits, top, rules, rows))
    _apply(rules.truncations, rows, kept)
    return kept.least.squeeze(1)


def _truncate_ranked(
    logits: Tensor, top: Tensor, rules: SamplingRules, rows: NDArray[np.intp], width: int
) -> TruncatedRows:
    """The rows for which the ``width`` most likely tokens determine the result, after their truncations."""
    source = _scaled(logits, top, rules, rows)
    scaled, columns = source.top_k(width)
    kept = RankedTokens(source, scaled, torch.from_numpy(rules.most_kept[rows] > 0).to(logits.device))
    _apply(rules.truncations, rows, kept)
    # Unranked tokens are at most as likely as the last ranked one.
    settled = (kept.least > scaled[:, -1:]).squeeze(1)
    return TruncatedRows(
        rows[settled.cpu().numpy()], columns[settled], exclude_below(scaled[settled], kept.least[settled])
    )


def _truncate_all(logits: Tensor, top: Tensor, rules: SamplingRules, rows: NDArray[np.intp]) -> TruncatedRows:
    source = _scaled(logits, top, rules, rows)
    scaled = source.all()
    kept = AllTokens(source, scaled)
    _apply(rules.truncations, rows, kept)
    return TruncatedRows(rows, None, exclude_below(scaled, kept.least))


def _apply(truncations: Sequence[Truncation], rows: NDArray[np.intp], kept: KeptTokens) -> None:
    """Apply the truncations in order. ``rows`` are the rows of the batch that are in ``kept``."""
    for truncation in truncations:
        part = truncation.take(rows)
        active = np.flatnonzero(part.active)
        if active.size == len(rows):
            kept.exclude_below(part.threshold(kept))
        elif active.size:
            index = torch.from_numpy(active).to(kept.least.device)
            kept.exclude_below(part.take(active).threshold(kept.take(index)), index)


def _scaled(logits: Tensor, top: Tensor, rules: SamplingRules, rows: NDArray[np.intp]) -> ScaledLogits:
    index = torch.from_numpy(rows).to(logits.device)
    temperature = torch.from_numpy(rules.temperature[rows]).to(logits)
    return ScaledLogits(logits, index, top[index, None], temperature[:, None])
