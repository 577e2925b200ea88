"""Attention to latents in a paged cache in Triton's interpreter, against float64, as in `test_attention_kernels`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from gpu_support import latents
from gpu_support.paged import PagedCase
from torch import Tensor
from torch.nn.functional import rms_norm

from megatron_runtime.gpu import attention, latent_attention
from megatron_runtime.gpu.launch import power_of_two

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@dataclass(frozen=True)
class LatentShape:
    """Sizes of a case: contexts with their new tokens, heads, channels rotated and of a latent, tokens of a block."""

    lengths: tuple[tuple[int, int], ...]
    heads: int
    widths: tuple[int, int]
    page: int
    window: int | None = None
    soft_cap: float | None = None

    def case(self, dtype: torch.dtype) -> PagedCase:
        """With random values."""
        return latents.random_case(self.lengths, self.heads, self.widths, self.page, dtype)


DECODE = ((1, 1), (17, 1), (70, 1))
MIXED = ((40, 1), (33, 20), (5, 5))
SHAPES = {
    "single tokens": LatentShape(DECODE, 16, (16, 64), 16),
    "single tokens of DeepSeek-V3": LatentShape(((37, 1),), 16, (64, 512), 16),
    "prompts and single tokens, latents of 256": LatentShape(((20, 1), (21, 4)), 16, (64, 256), 32),
    "heads in several programs": LatentShape(((40, 1), (20, 3)), 80, (16, 32), 16),
    "widths that are no powers of two": LatentShape(MIXED, 3, (8, 40), 16),
    "prompts alone": LatentShape(((19, 19), (70, 37)), 8, (16, 32), 16),
    "windows": LatentShape(((70, 1), (66, 20)), 4, (16, 32), 16, window=13),
    "soft cap": LatentShape(MIXED, 2, (16, 32), 64, soft_cap=5.0),
    "soft cap and window": LatentShape(((75, 1), (40, 9)), 2, (16, 32), 256, window=20, soft_cap=5.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_to_latents_equals_that_of_float64(shape: LatentShape, dtype: torch.dtype) -> None:
    case = shape.case(dtype)
    before = case.cache[0].clone()
    scoring = (shape.widths[1], shape.window, shape.soft_cap)
    seen = latents.attend(case, *scoring)
    before[case.slots // shape.page, :, case.slots % shape.page] = rotated_keys(case)
    assert torch.allclose(case.cache[0], before, rtol=1e-3, atol=1e-3, equal_nan=True)
    wanted = latents.expected(case, *scoring)
    assert seen.isfinite().all()
    assert (seen.double() - wanted).norm() / wanted.norm() < (5e-6 if dtype is torch.float32 else 1e-3)


def rotated_keys(case: PagedCase) -> Tensor:
    """Of the new tokens, as the cache should hold them: [T, 1, width]."""
    assert case.rotation is not None
    cosines, sines = (part.double() for part in case.rotation)
    keys = case.heads[:, -2:-1].double()
    turned = keys[..., : cosines.shape[-1]]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cosines + torch.cat((-second, first), dim=-1) * sines
    return torch.cat((turned, keys[..., cosines.shape[-1] :]), dim=-1).to(case.heads.dtype)


def test_channels_without_a_position_are_not_rotated() -> None:
    case = PagedCase.random(((3, 1), (9, 4)), (2, 1), 48, 8, torch.float32, turned=0)
    found, wanted = latents.attend(case, 32), latents.expected(case, 32)
    assert (found.double() - wanted).norm() / wanted.norm() < 5e-6


@pytest.mark.parametrize("window", [None, 600])
def test_contexts_of_several_splits_are_merged(window: int | None) -> None:
    lengths = ((attention.SPLIT, 1), (attention.SPLIT + 1, 1), (2 * attention.SPLIT + 100, 1), (3, 1))
    case = latents.random_case(lengths, 2, (16, 32), 128, torch.float32)
    found, wanted = latents.attend(case, 32, window), latents.expected(case, 32, window)
    assert (found.double() - wanted).norm() / wanted.norm() < 5e-6


def test_long_contexts_have_longer_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SPLIT", 32)
    monkeypatch.setattr(attention, "MOST_SPLITS", 3)
    case = latents.random_case(((3 * 32 * 5, 1), (3 * 32, 1), (3 * 32 + 1, 1)), 2, (16, 32), 16, torch.float32)
    found, wanted = latents.attend(case, 32), latents.expected(case, 32)
    assert (found.double() - wanted).norm() / wanted.norm() < 5e-6


def test_the_bits_of_a_request_do_not_depend_on_its_batch() -> None:
    """Alone, beside a context with more splits, and beside prompts."""
    alone = latents.random_case(((90, 1),), 4, (16, 64), 16, torch.float16)
    others = [
        latents.random_case(((90, 1), other), 4, (16, 64), 16, torch.float16)
        for other in ((attention.SPLIT + 9, 1), (7, 7))
    ]
    bits = [latents.attend(case.with_first_of(alone), 64)[:1] for case in (alone, *others)]
    assert torch.equal(bits[0], bits[1])
    assert torch.equal(bits[0], bits[2])


@pytest.mark.usefixtures("exact_products")
def test_the_bits_of_a_prompt_do_not_depend_on_its_chunks() -> None:
    whole = latents.random_case(((90, 90),), 4, (16, 32), 16, torch.float32)
    wanted = latents.attend(whole, 32, 50)
    pieces, done = [], 0
    for size in (40, 13, 37):
        pieces.append(latents.attend(whole.piece(done, size), 32, 50))
        done += size
    assert torch.equal(torch.cat(pieces), wanted)


def test_padding_is_neither_stored_nor_attended() -> None:
    case = latents.random_case(((20, 1), (9, 1)), 2, (16, 32), 16, torch.float32)
    wanted = latents.attend(case, 32)
    before = case.cache[0].clone()
    padded = case.padded(rows=2)
    seen = latents.attend(padded, 32)
    assert torch.equal(seen[:2], wanted)
    assert torch.equal(padded.cache[0][1:].nan_to_num(9), before[1:].nan_to_num(9))
    assert not padded.cache[0][0].any()


@pytest.mark.parametrize("turned", [0, 16])
def test_tokens_of_no_request_have_zeros(turned: int) -> None:
    """Beside two requests without a token."""
    case = PagedCase.random(((20, 1), (9, 4)), (17, 1), 48, 16, torch.float32, turned=turned)
    wanted, count = latents.attend(case, 32), len(case.heads)
    rotation = case.rotation and tuple(torch.cat((part, part[:2])) for part in case.rotation)
    heads, slots = torch.cat((case.heads, case.heads[:2])), torch.cat((case.slots, torch.tensor([-1, -1])))
    starts, tables = (torch.cat((part, part[-1:], part[-1:])) for part in (case.query_starts, case.tables))
    padding = {"lengths": (*case.lengths, (1, 0), (1, 0)), "query_starts": starts, "tables": tables}
    seen = latents.attend(replace(case, heads=heads, slots=slots, rotation=rotation, **padding), 32)
    assert torch.equal(seen[:count], wanted)
    assert torch.equal(seen[count:], torch.zeros(2, 17, 32))


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("heads", "widths"), [(3, (8, 40)), (17, (64, 128))])
def test_rows_have_the_channels_of_queries_and_keys(heads: int, widths: tuple[int, int], is_interleaved: bool) -> None:
    rotated, latent = widths
    sizes = ((5, heads, 24 + rotated), (5, latent + rotated), (latent,))
    queries, compressed, weight = (torch.randn(size) for size in sizes)
    rows = torch.full((5, heads + 1, rotated + latent), 7.0)
    latent_attention.fill_rows(rows, queries, compressed, weight, 1e-5, 0.5, is_interleaved=is_interleaved)

    def halves(channels: Tensor) -> Tensor:
        if not is_interleaved:
            return channels
        return torch.cat((channels[..., ::2], channels[..., 1::2]), dim=-1)

    assert torch.equal(rows[:, :-1, :rotated], halves(queries[..., -rotated:]) * 0.5)
    assert torch.equal(rows[:, -1, :rotated], halves(compressed[:, latent:]))
    assert torch.allclose(rows[:, -1, rotated:], rms_norm(compressed[:, :latent], (latent,), weight, 1e-5), atol=1e-5)
    assert (rows[:, :-1, rotated:] == 7).all(), "these are those of the products with the matrices of heads"


@pytest.mark.parametrize("heads", [1, 5, 16, 20, 128])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_programs_have_at_least_the_rows_of_a_matrix_product(heads: int, element_bytes: int) -> None:
    for capability in (80, 86, 90, 100, 120):
        sizes = latent_attention.split_sizes(capability, heads, element_bytes)
        assert sizes.rows >= attention.SMALLEST_DOT
        assert sizes.rows == power_of_two(sizes.rows)
        assert attention.SPLIT % sizes.keys == 0
