"""Attention to latents in a paged cache in Triton's interpreter, against float64, as in `test_attention_kernels`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from gpu_support import latents
from gpu_support.latents import LatentShape
from gpu_support.paged import PagedCase
from torch import Tensor

from megatron_runtime.gpu import attention, latent_attention
from megatron_runtime.gpu.launch import power_of_two

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@dataclass(frozen=True)
class Shape:
    """Sizes of a case: contexts with their new tokens, heads, channels that are rotated, and those of a head."""

    lengths: tuple[tuple[int, int], ...]
    heads: int
    rotated: int
    sizes: LatentShape
    page: int = 16
    window: int | None = None
    soft_cap: float | None = None

    def case(self, dtype: torch.dtype) -> PagedCase:
        """With random values."""
        return latents.random_case(self.lengths, self.heads, (self.rotated, self.sizes.latent), self.page, dtype)


SMALL = LatentShape(32)
DECODE = ((1, 1), (17, 1), (70, 1))
MIXED = ((40, 1), (33, 20), (5, 5))
SHAPES = {
    "single tokens": Shape(DECODE, 16, 16, LatentShape(64, is_interleaved=True)),
    "single tokens of DeepSeek-V3": Shape(((37, 1),), 16, 64, LatentShape(512, 128, 128, is_interleaved=True)),
    "prompts and single tokens, latents of 256": Shape(((20, 1), (21, 4)), 16, 64, LatentShape(256, 192, 128), page=32),
    "heads in several programs": Shape(((40, 1), (20, 3)), 80, 16, SMALL),
    "widths that are no powers of two": Shape(MIXED, 3, 8, LatentShape(48, 24, 20, is_interleaved=True)),
    "prompts alone": Shape(((19, 19), (70, 37)), 8, 16, SMALL),
    "windows": Shape(((70, 1), (66, 20)), 4, 16, SMALL, window=13),
    "soft cap": Shape(MIXED, 2, 16, SMALL, page=64, soft_cap=5.0),
    "soft cap and window": Shape(((75, 1), (40, 9)), 2, 16, SMALL, page=256, window=20, soft_cap=5.0),
    "several splits": Shape(((300, 1), (3, 1), (257, 1)), 3, 8, LatentShape(48, 24, 20)),
    "several splits and a window": Shape(((300, 1), (3, 1), (257, 1)), 2, 16, SMALL, window=30),
    "several splits beside prompts": Shape(((300, 1), (5, 5), (270, 2)), 2, 16, SMALL),
    "more requests than in a tile": Shape(((300, 1), *((9, 1),) * 40), 1, 8, LatentShape(16, 16, 16)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_to_latents_equals_that_of_float64(shape: Shape, dtype: torch.dtype) -> None:
    case = shape.case(dtype)
    before = case.cache[0].clone()
    scoring = (shape.sizes, shape.window, shape.soft_cap)
    seen = latents.attend(case, *scoring)
    before[case.slots // shape.page, :, case.slots % shape.page] = rotated_keys(case, shape.sizes)
    assert torch.allclose(case.cache[0], before, rtol=1e-3, atol=1e-3, equal_nan=True)
    wanted = latents.expected(case, *scoring)
    assert seen.isfinite().all()
    assert (seen.double() - wanted).norm() / wanted.norm() < (5e-6 if dtype is torch.float32 else 1e-3)


def rotated_keys(case: PagedCase, sizes: LatentShape) -> Tensor:
    """Of the new tokens, as the cache should hold them: [T, 1, width]."""
    keys = latents.plain_rows(case, sizes).heads[:, -2:-1]
    if case.rotation is None:
        return keys.to(case.heads.dtype)
    cosines, sines = (part.double() for part in case.rotation)
    turned = keys[..., : cosines.shape[-1]]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cosines + torch.cat((-second, first), dim=-1) * sines
    return torch.cat((turned, keys[..., cosines.shape[-1] :]), dim=-1).to(case.heads.dtype)


@pytest.mark.parametrize("turned", [0, 8])
def test_channels_without_a_position_are_not_rotated(turned: int) -> None:
    """None at all, and those of the second half."""
    sizes = LatentShape(32, is_interleaved=True)
    case = PagedCase.random(((3, 1), (9, 4)), (2, 1), 48, 8, torch.float32, turned=turned)
    before = case.cache[0].clone()
    found, wanted = latents.attend(case, sizes), latents.expected(case, sizes)
    before[case.slots // 8, :, case.slots % 8] = rotated_keys(case, sizes)
    assert torch.allclose(case.cache[0], before, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert (found.double() - wanted).norm() / wanted.norm() < 5e-6


@pytest.mark.parametrize("window", [None, 600])
def test_contexts_of_several_splits_are_merged(window: int | None) -> None:
    lengths = ((attention.SPLIT, 1), (attention.SPLIT + 1, 1), (2 * attention.SPLIT + 100, 1), (3, 1))
    case = latents.random_case(lengths, 2, (16, 32), 128, torch.float32)
    found, wanted = latents.attend(case, SMALL, window), latents.expected(case, SMALL, window)
    assert (found.double() - wanted).norm() / wanted.norm() < 5e-6


def test_long_contexts_have_longer_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SPLIT", 32)
    monkeypatch.setattr(attention, "MOST_SPLITS", 3)
    case = latents.random_case(((3 * 32 * 5, 1), (3 * 32, 1), (3 * 32 + 1, 1)), 2, (16, 32), 16, torch.float32)
    found, wanted = latents.attend(case, SMALL), latents.expected(case, SMALL)
    assert (found.double() - wanted).norm() / wanted.norm() < 5e-6


@pytest.mark.parametrize("context", [90, attention.SPLIT + 90])
def test_the_bits_of_a_request_do_not_depend_on_its_batch(context: int) -> None:
    """Alone, beside a context with more splits, beside prompts, and beside both: its splits are merged where its values
    are computed, or before."""
    alone = latents.random_case(((context, 1),), 4, (16, 64), 16, torch.float16)
    longer, prompt = (2 * attention.SPLIT + 9, 1), (7, 7)
    others = [
        latents.random_case(((context, 1), *other), 4, (16, 64), 16, torch.float16)
        for other in ((longer,), (prompt,), (longer, prompt))
    ]
    bits = [latents.attend(case.with_first_of(alone), LatentShape(64))[:1] for case in (alone, *others)]
    assert all(torch.equal(bits[0], other) for other in bits[1:])


@pytest.mark.usefixtures("exact_products")
def test_the_bits_of_a_prompt_do_not_depend_on_its_chunks() -> None:
    whole = latents.random_case(((90, 90),), 4, (16, 32), 16, torch.float32)
    wanted = latents.attend(whole, SMALL, 50)
    pieces, done = [], 0
    for size in (40, 13, 37):
        pieces.append(latents.attend(whole.piece(done, size), SMALL, 50))
        done += size
    assert torch.equal(torch.cat(pieces), wanted)


def test_padding_is_neither_stored_nor_attended() -> None:
    case = latents.random_case(((20, 1), (9, 1)), 2, (16, 32), 16, torch.float32)
    wanted = latents.attend(case, SMALL)
    before = case.cache[0].clone()
    padded = case.padded(rows=2)
    seen = latents.attend(padded, SMALL)
    assert torch.equal(seen[:2], wanted)
    assert torch.equal(padded.cache[0][1:].nan_to_num(9), before[1:].nan_to_num(9))
    assert not padded.cache[0][0].any()


@pytest.mark.parametrize("lengths", [((20, 1), (9, 1)), ((300, 1), (9, 1)), ((20, 1), (9, 4)), ((300, 1), (9, 4))])
@pytest.mark.parametrize("turned", [0, 16])
def test_tokens_of_no_request_have_zeros(turned: int, lengths: tuple[tuple[int, int], ...]) -> None:
    """Beside two requests without a token."""
    case = PagedCase.random(lengths, (17, 1), 48, 16, torch.float32, turned=turned)
    wanted, count = latents.attend(case, SMALL), len(case.heads)
    rotation = case.rotation and tuple(torch.cat((part, part[:2])) for part in case.rotation)
    heads, slots = torch.cat((case.heads, case.heads[:2])), torch.cat((case.slots, torch.tensor([-1, -1])))
    starts, tables = (torch.cat((part, part[-1:], part[-1:])) for part in (case.query_starts, case.tables))
    padding = {"lengths": (*case.lengths, (1, 0), (1, 0)), "query_starts": starts, "tables": tables}
    seen = latents.attend(replace(case, heads=heads, slots=slots, rotation=rotation, **padding), SMALL)
    assert torch.equal(seen[:count], wanted)
    assert torch.equal(seen[count:], torch.zeros(2, 17, SMALL.values))


@pytest.mark.parametrize("heads", [1, 5, 16, 20, 128])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_programs_have_at_least_the_rows_of_a_matrix_product(heads: int, element_bytes: int) -> None:
    for capability in (80, 86, 90, 100, 120):
        sizes = latent_attention.split_sizes(capability, heads, element_bytes)
        assert sizes.rows >= attention.SMALLEST_DOT
        assert sizes.rows == power_of_two(sizes.rows)
        assert attention.SPLIT % sizes.keys == 0
