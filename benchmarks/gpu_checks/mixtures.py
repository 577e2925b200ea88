"""Mixtures of experts: whether their kernels compute the right thing, and the speed of a model with experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu_support.mixture import MixtureCase

from gpu_checks.correctness import check_engine, compared, small_model
from gpu_checks.random_models import random_model
from gpu_checks.results import DEVICE, Check, Result, Sizes, free_memory
from gpu_checks.speed import copied_bytes_per_second, decode, prefill, products_per_second
from megatron_runtime.gpu import expert_choice, experts
from megatron_runtime.model.config import ExpertsConfig
from megatron_runtime.model.decoder import Decoder

CASES: dict[str, dict[str, Any]] = {
    "one token": {"tokens": 1, "experts": (8, 4), "elsewhere": 1},
    "most experts empty": {"tokens": 11, "experts": (64, 2)},
    "many tokens": {"tokens": 400, "experts": (8, 2)},
    "experts elsewhere": {"tokens": 50, "experts": (5, 2), "elsewhere": 3, "activation": "gelu_tanh"},
    "clamped gates, biases": {"tokens": 50, "experts": (8, 4), "is_biased": True, "clamped": (1.702, 7.0)},
    "no gate": {"tokens": 50, "experts": (8, 2), "is_gated": False, "activation": "relu_squared"},
    "weights of the inputs": {"tokens": 50, "experts": (8, 1), "weights_inputs": True},
    "a shared expert with a gate": {"tokens": 50, "experts": (8, 2), "shared": "gated"},
}


def checks(sizes: Sizes) -> Iterator[Check]:
    """Kernels, bits and engine."""
    for dtype in sizes.dtypes:
        yield f"experts, {dtype}", partial(check_results, dtype, sizes)
    yield "bits of a token beside others", partial(check_bits, sizes)
    yield "choice of experts", partial(check_choice, sizes)
    yield "engine's tokens, experts", partial(check_engine, small_mixture(), "experts, ")


def measurements(sizes: Sizes) -> Iterator[Check]:
    """With one model."""
    yield "speed with experts", partial(measure, sizes)


def random_case(sizes: Sizes, dtype: torch.dtype, *, tokens: int, **options: Any) -> MixtureCase:
    """Channels that tiles do not divide; the interpreter has a tenth of the tokens."""
    channels = (336, 200) if sizes.has_gpu else (40, 24)
    return MixtureCase.random(tokens if sizes.has_gpu else -(-tokens // 10), sizes=channels, dtype=dtype, **options)


def check_results(dtype: torch.dtype, sizes: Sizes) -> Iterator[Result]:
    """Against float64, with all sizes of tiles."""
    for name, options in CASES.items():
        case = random_case(sizes, dtype, **options)
        there = case.on(DEVICE)
        found = torch.cat([there.process(tile_rows).cpu() for tile_rows in experts.TILE_ROWS])
        yield compared(f"experts: {name}", found, case.expected().repeat(len(experts.TILE_ROWS), 1), dtype)


def check_bits(sizes: Sizes) -> Iterator[Result]:
    """Of tokens alone, and among others."""
    case = random_case(sizes, sizes.dtypes[-1], tokens=400, experts=(8, 2)).on(DEVICE)
    for tile_rows in experts.TILE_ROWS:
        together, places = case.process(tile_rows).cpu(), (0, 7, len(case.hidden) - 1)
        alone = [case.rows(place, place + 1).process(tile_rows)[0].cpu() for place in places]
        differing = sum(not torch.equal(together[place], one) for place, one in zip(places, alone, strict=True))
        words = f"bits of a token beside others, tiles of {tile_rows}"
        yield Result(words, f"{differing} of {len(places)} differ", "0", is_wrong=differing > 0)


def check_choice(sizes: Sizes) -> Iterator[Result]:
    """Chosen experts, and their visits in order, against PyTorch's on the host."""
    tokens, count = (3000, 128) if sizes.has_gpu else (20, 12)
    logits = torch.randn(tokens, count, generator=torch.Generator().manual_seed(5))
    choice = expert_choice.Choice(4, "softmax", normalizes=True, multiplier=1.0)
    weights, chosen = expert_choice.route(logits.to(DEVICE), choice, None, None)
    expected_weights, expected = logits.softmax(-1).topk(4)
    differing = int((chosen.cpu() != expected).any(-1).sum())
    yield Result("choice of experts", f"{differing} of {tokens} differ", "0", is_wrong=differing > 0)
    normalized = expected_weights / expected_weights.sum(-1, keepdim=True)
    yield compared("weights of experts", weights, normalized, torch.float32)
    _, joined = expert_choice.route(logits.to(DEVICE), replace(choice, adds_shared=True), None, None)
    differing = int((joined.cpu() != torch.cat((expected, torch.full((tokens, 1), count)), 1)).any(-1).sum())
    yield Result("choice of experts, and a shared one", f"{differing} of {tokens} differ", "0", is_wrong=differing > 0)
    visits, expected = experts._sorted(chosen, 0, count), expected.flatten()
    is_right = visits.order.cpu().equal(expected.argsort(stable=True).int())
    is_right &= visits.starts.cpu().equal(torch.searchsorted(expected.sort()[0], torch.arange(count + 1)).int())
    words = "equal" if is_right else "another order"
    yield Result("visits by expert", words, "those of PyTorch", is_wrong=not is_right)


def small_mixture() -> Decoder:
    """Of softmax weights, two experts for each token."""
    return small_model(architecture="qwen3_moe", experts=ExpertsConfig(8, 2, 48))


@torch.inference_mode()
def measure(sizes: Sizes) -> Iterator[Result]:
    """A prefill and decode passes. The floor reads the experts that a batch of random choices is expected to need."""
    free_memory(has_gpu=sizes.has_gpu)
    ceilings = copied_bytes_per_second(sizes), products_per_second(sizes)
    sizes = replace(sizes, model=sizes.mixture)
    for result in measure_passes(random_model(sizes), sizes, *ceilings):
        yield replace(result, name=f"experts: {result.name}")


def measure_passes(model: Decoder, sizes: Sizes, bandwidth: float, flops: float) -> Iterator[Result]:
    """Those of a model with experts, whose matrices may be in fp8."""
    config = model.config.experts
    assert config is not None
    share, head = config.per_token / config.count, model.head
    assert head is not None
    weights = {name: each for name, each in model.named_parameters() if "embed" not in name}
    multiplied = {name: each.numel() * sizes.dtype.itemsize for name, each in weights.items() if "scales" not in name}
    of_experts, dense = divided(multiplied)
    of_head = head.weight.numel() * sizes.dtype.itemsize  # Of one token of a prompt.
    yield prefill(model, sizes, dense - of_head + round(share * of_experts), flops)
    of_experts, dense = divided({name: each.numel() * each.element_size() for name, each in weights.items()})
    for context in sizes.contexts:
        for requests in sizes.batches:
            needed = dense + round((1 - (1 - share) ** requests) * of_experts)
            yield decode(model, sizes, requests, context, needed, bandwidth)


def divided(parts: dict[str, int]) -> tuple[int, int]:
    """Sums of those of the experts, and of the others."""
    of_experts = sum(size for name, size in parts.items() if ".networks." in name)
    return of_experts, sum(parts.values()) - of_experts
