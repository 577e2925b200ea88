"""Cases of attention to latents, made of those with keys and values of one key head, whose keys alone are used."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from gpu_support.paged import PagedCase
from torch import Tensor
from torch.nn.functional import rms_norm

from megatron_runtime.gpu import attention, latent_attention

EPS = 1e-5


@dataclass(frozen=True)
class LatentShape:
    """Channels of a head and its matrices."""

    latent: int
    plain: int = 16
    """Those of a query that are multiplied by a matrix; at most as many as those of a latent."""
    values: int = 12
    is_interleaved: bool = False


def random_case(
    lengths: tuple[tuple[int, int], ...], heads: int, widths: tuple[int, int], page: int, dtype: torch.dtype
) -> PagedCase:
    """As `PagedCase.random`; ``widths`` are the channels that are rotated and those of a latent."""
    return PagedCase.random(lengths, (heads, 1), sum(widths), page, dtype, turned=widths[0])


def matrices(case: PagedCase, shape: LatentShape) -> latent_attention.LatentMatrices:
    """The same for all cases with these sizes, and with products as large as their factors."""
    generator = torch.Generator().manual_seed(2)
    heads = case.heads.shape[1] - 2
    up = torch.randn(heads, shape.plain + shape.values, shape.latent, generator=generator)
    up[:, : shape.plain] *= shape.plain**-0.5
    up[:, shape.plain :] *= shape.latent**-0.5
    weight = 1 + torch.randn(shape.latent, generator=generator) / 4
    up, weight = (each.to(case.heads.device, case.heads.dtype) for each in (up, weight))
    return latent_attention.LatentMatrices(up, (weight, EPS), 0.75, shape.values, shape.is_interleaved)


def projections(case: PagedCase, shape: LatentShape) -> tuple[Tensor, Tensor]:
    """Queries [T, heads, plain + rotated], and latents with the channels to rotate, rows of wider ones."""
    rotated = case.heads.shape[2] - shape.latent
    wide = case.heads[:, :-2]
    queries = torch.cat((wide[..., rotated : rotated + shape.plain], wide[..., :rotated]), dim=-1).contiguous()
    key = case.heads[:, -2]
    other = key.new_full((len(key), 16), torch.nan)
    return queries, torch.cat((other, key[:, rotated:], key[:, :rotated]), dim=-1)[:, 16:]


def attend(case: PagedCase, shape: LatentShape, window: int | None = None, soft_cap: float | None = None) -> Tensor:
    """By the kernels."""
    lengths = torch.tensor([length for length, _ in case.lengths], dtype=torch.int32).to(case.heads.device)
    batch = attention.PagedBatch(case.slots, case.query_starts, lengths, case.tables)
    given = *projections(case, shape), matrices(case, shape)
    return latent_attention.attend_latents(*given, case.rotation, case.cache[0], batch, window, soft_cap)


def plain_rows(case: PagedCase, shape: LatentShape) -> PagedCase:
    """The same with queries and keys that attend to each other without a matrix, in float64."""
    (queries, compressed), given = projections(case, shape), matrices(case, shape)
    queries, compressed, up = queries.double(), compressed.double(), given.up.double()
    latents = torch.einsum("thn,hnr->thr", queries[..., : shape.plain], up[:, : shape.plain])
    turned = _halves(queries[..., shape.plain :], shape)
    weight, eps = given.norm
    normed = rms_norm(compressed[:, : shape.latent], (shape.latent,), weight.double(), eps)
    key = torch.cat((_halves(compressed[:, shape.latent :], shape), normed), dim=-1)[:, None]
    rows = torch.cat((turned, latents), dim=-1) * given.multiplier
    return replace(case, heads=torch.cat((rows, key, key), dim=1))


def expected(case: PagedCase, shape: LatentShape, window: int | None = None, soft_cap: float | None = None) -> Tensor:
    """In float64, from the cache, which has the new keys; but queries and means are rounded as those of the kernels."""
    keys, dtype = case.cache[0], case.heads.dtype
    seen = replace(plain_rows(case, shape), cache=(keys, keys)).expected(window, soft_cap, rounded=dtype)
    means = seen[..., -shape.latent :].to(dtype).double()
    return torch.einsum("thr,hvr->thv", means, matrices(case, shape).up[:, shape.plain :].double())


def _halves(channels: Tensor, shape: LatentShape) -> Tensor:
    if not shape.is_interleaved:
        return channels
    return torch.cat((channels[..., ::2], channels[..., 1::2]), dim=-1)
