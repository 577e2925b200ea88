"""How many launches a layer of each kind of model has in the CUDA graphs of a decode pass, on a pretended GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gpu_support.pretended import PretendedDevice
from gpu_support.small_engine import LATENTS, on_gpu, random_decoder, small_engine

from megatron_runtime.model.config import ClampedGate, ExpertsConfig, RoutingConfig

LAUNCHES_AROUND_LAYERS = 17
"""One less without a norm before the first layer."""
EXPERTS = ExpertsConfig(count=8, per_token=2, intermediate_size=64)
GROUPS = RoutingConfig("sigmoid", normalize_weights=True, has_selection_bias=True, groups=4, groups_per_token=2)
DEEPSEEK = ExpertsConfig(8, 2, 64, GROUPS, shared_intermediate_size=64)
WIDER = replace(DEEPSEEK, shared_intermediate_size=128)
QWEN = replace(EXPERTS, shared_intermediate_size=32, has_shared_expert_gate=True)
CLAMPED: dict[str, Any] = {"clamped_gate": ClampedGate(1.7, 0.5), "mlp_bias": True, "attention_sinks": True}
AROUND: dict[str, Any] = {"norm": "rms_plus_one", "norm_placement": "around", "activation": "gelu_tanh"}
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "dense": (10, {}),
    "norms of heads": (11, {"query_key_norm": "head"}),
    "norms after, norms of projections": (11, {"query_key_norm": "projection", "norm_placement": "after"}),
    "norms around, norms of heads": (11, AROUND | {"query_key_norm": "head"}),
    "latents": (12, LATENTS),
    "clamped gates": (10, CLAMPED),
    "no gate, squared": (11, {"gated_feed_forward": False, "activation": "relu_squared"}),
    "experts": (13, {"experts": EXPERTS}),
    "experts, norms of heads": (14, {"experts": EXPERTS, "query_key_norm": "head"}),
    "experts, clamped gates": (13, CLAMPED | {"experts": EXPERTS}),
    "experts, a shared one": (16, {"experts": replace(EXPERTS, shared_intermediate_size=32)}),
    "experts, a shared one of their size": (13, {"experts": replace(EXPERTS, shared_intermediate_size=64)}),
    "experts, a shared one with a gate, norms of heads": (18, {"experts": QWEN, "query_key_norm": "head"}),
    "experts, latents": (15, LATENTS | {"experts": EXPERTS}),
    "experts, a shared one of their size, latents": (15, LATENTS | {"experts": DEEPSEEK}),
    "experts, a wider shared one, latents": (18, LATENTS | {"experts": WIDER}),
}
"""The launches of a layer with contexts of several splits, and the model."""


def launches(device: PretendedDevice, **changes: Any) -> int:
    """Of the graphs of a decode pass with three requests and its sampling."""
    device.graphs = []
    small_engine(on_gpu(random_decoder(**changes)), num_cuda_graphs=1, max_requests=3)
    forward, sampling = device.graphs
    return len(forward.launches) + len(sampling.launches)


@pytest.mark.usefixtures("device_guard", "short_splits")
@pytest.mark.parametrize(("per_layer", "changes"), MODELS.values(), ids=MODELS)
def test_a_layer_has_as_many_launches_as_are_known(
    per_layer: int, changes: dict[str, Any], device: PretendedDevice
) -> None:
    """More would slow each token of such a model down; who saves some lowers the number."""
    one, two = (launches(device, num_layers=layers, **changes) for layers in (1, 2))
    around = LAUNCHES_AROUND_LAYERS - (changes.get("norm_placement") == "after")
    assert (two - one, one - (two - one)) == (per_layer, around)
