"""Cases of attention to latents: those with keys and values of one key head, of which only the keys are used."""

from __future__ import annotations

from dataclasses import replace

import torch
from gpu_support.paged import PagedCase
from torch import Tensor

from megatron_runtime.gpu import attention, latent_attention


def random_case(
    lengths: tuple[tuple[int, int], ...], heads: int, widths: tuple[int, int], page: int, dtype: torch.dtype
) -> PagedCase:
    """As `PagedCase.random`; ``widths`` are the channels that are rotated and those of a latent."""
    return PagedCase.random(lengths, (heads, 1), sum(widths), page, dtype, turned=widths[0])


def attend(case: PagedCase, latent: int, window: int | None = None, soft_cap: float | None = None) -> Tensor:
    """By the kernels."""
    lengths = torch.tensor([length for length, _ in case.lengths], dtype=torch.int32).to(case.heads.device)
    batch = attention.PagedBatch(case.slots, case.query_starts, lengths, case.tables)
    rows = case.heads[:, :-1].clone(memory_format=torch.contiguous_format)  # because the queries are rotated in place
    return latent_attention.attend_latents(rows, case.rotation, case.cache[0], batch, latent, window, soft_cap)


def expected(case: PagedCase, latent: int, window: int | None = None, soft_cap: float | None = None) -> Tensor:
    """In float64, from the cache, which has the new keys."""
    keys = case.cache[0]
    return replace(case, cache=(keys, keys)).expected(window, soft_cap)[..., -latent:]
