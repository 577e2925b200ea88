"""Mixtures of experts in Triton's interpreter, against float64 and PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_support.mixture import MixtureCase

from megatron_runtime.gpu import expert_choice, experts
from megatron_runtime.model.config import ExpertsConfig, RoutingConfig
from megatron_runtime.model.experts.routing import make_router

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
LIMITS = {torch.float32: 1e-6, torch.float16: 2e-3}
CASES: dict[str, dict[str, Any]] = {
    "one token, most experts empty": {"tokens": 1, "experts": (8, 2), "sizes": (32, 64)},
    "few tokens, biases": {"tokens": 5, "experts": (6, 3), "sizes": (40, 24), "is_biased": True, "activation": "gelu"},
    "experts elsewhere": {
        "tokens": 40,
        "experts": (3, 2),
        "sizes": (48, 40),
        "elsewhere": 2,
        "activation": "gelu_tanh",
    },
    "no gate": {"tokens": 40, "experts": (4, 2), "sizes": (48, 72), "is_gated": False, "activation": "relu_squared"},
    "clamped gates": {"tokens": 9, "experts": (4, 2), "sizes": (32, 24), "is_biased": True, "clamped": (1.7, 0.5)},
    "weights of the inputs": {"tokens": 6, "experts": (4, 1), "sizes": (32, 24), "weights_inputs": True},
    "a shared expert": {"tokens": 6, "experts": (4, 2), "sizes": (40, 24), "elsewhere": 1, "shared": "plain"},
    "a shared expert with a gate": {"tokens": 3, "experts": (4, 2), "sizes": (40, 24), "shared": "gated"},
}


@DTYPES
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_equal_those_of_float64(case: dict[str, Any], dtype: torch.dtype) -> None:
    mixture = MixtureCase.random(**case, dtype=dtype)
    found, expected = mixture.process(16), mixture.expected()
    assert (found.double() - expected).norm() <= LIMITS[dtype] * expected.norm()


@DTYPES
@pytest.mark.parametrize("tile_rows", experts.TILE_ROWS)
@pytest.mark.usefixtures("exact_products")
def test_the_bits_of_a_token_do_not_depend_on_other_tokens(tile_rows: int, dtype: torch.dtype) -> None:
    """Alone, and among many, of which some experts have several tiles."""
    mixture = MixtureCase.random(150, (3, 2), (40, 24), dtype, shared="gated")
    found, expected = mixture.process(tile_rows), mixture.expected()
    assert (found.double() - expected).norm() <= LIMITS[dtype] * expected.norm()
    for at in (0, 77, 149):
        assert torch.equal(mixture.rows(at, at + 1).process(tile_rows)[0], found[at])


@pytest.mark.parametrize("tokens", [3, experts.SORT_BLOCK])
def test_visits_are_sorted_by_expert_in_their_order(tokens: int) -> None:
    """Beyond SORT_BLOCK visits with other blocks; experts before and after those that are here have none."""
    chosen = torch.randint(0, 9, (tokens, 2), generator=torch.Generator().manual_seed(4))
    visits = experts._sorted(chosen, 2, 5)
    sorted_visits = [(chosen.flatten() == expert).nonzero().flatten().tolist() for expert in range(2, 7)]
    assert [visits.order[visits.starts[at] : visits.starts[at + 1]].tolist() for at in range(5)] == sorted_visits


ROUTERS: dict[str, RoutingConfig] = {
    "softmax": RoutingConfig(normalize_weights=True),
    "a factor": RoutingConfig(weight_multiplier=2.5),
    "sigmoid": RoutingConfig("sigmoid", normalize_weights=True),
    "a bias": RoutingConfig("sigmoid", has_selection_bias=True),
    "groups": RoutingConfig(groups=4, groups_per_token=2),
    "sums of two": RoutingConfig(
        "sigmoid", has_selection_bias=True, groups=3, groups_per_token=2, group_scores="top_2_sum"
    ),
}


@pytest.mark.parametrize("is_replayed", [False, True])
@pytest.mark.parametrize("routing", ROUTERS.values(), ids=ROUTERS)
def test_experts_are_chosen_as_by_pytorch(routing: RoutingConfig, is_replayed: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    router = make_router(16, ExpertsConfig(12, 3, 8, routing), torch.float32)
    for weight in router.parameters():
        weight.data.normal_(generator=generator)
    hidden = torch.randn(7, 16, generator=generator)
    replayed = torch.randint(0, 12, (7, 3), generator=generator).where(torch.arange(7)[:, None] % 2 == 0, -1)
    given = replayed if is_replayed else None
    for found, expected in zip(router.choose_on_gpu(router.linear(hidden), given), router(hidden, given), strict=True):
        assert found.dtype == expected.dtype
        assert torch.allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("routing", ROUTERS.values(), ids=ROUTERS)
def test_a_shared_expert_is_chosen_after_the_others(routing: RoutingConfig) -> None:
    """With weight one, also where the choices are replayed."""
    router = make_router(16, ExpertsConfig(12, 3, 8, routing), torch.float32)
    if router.selection_bias is not None:
        router.selection_bias.data.zero_()
    logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(2))
    for replayed in (None, torch.tensor([[7, 1, -1]] * 5)):
        weights, chosen = router.choose_on_gpu(logits, replayed, adds_shared=True)
        expected_weights, expected = router.choose_on_gpu(logits, replayed)
        assert torch.equal(weights, torch.cat((expected_weights, torch.ones(5, 1)), 1))
        assert torch.equal(chosen, torch.cat((expected, torch.full((5, 1), 12)), 1))


def test_of_equal_experts_the_first_are_chosen() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float16)
    _, chosen = expert_choice.route(
        logits, expert_choice.Choice(2, "softmax", normalizes=False, multiplier=1.0), None, None
    )
    assert chosen.tolist() == [[1, 2], [0, 1]]


@pytest.mark.parametrize(("visits", "rows"), [(8, 16), (1024, 16), (2048, 64), (65536, 128)])
def test_tiles_are_as_large_as_the_visits_of_an_expert(visits: int, rows: int) -> None:
    assert experts.tile_rows(visits, 128) == rows
