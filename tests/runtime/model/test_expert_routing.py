"""Routers select the experts of transformers, with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeConfig, Llama4TextConfig, Qwen2MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.config import ExpertsConfig, RoutingConfig
from megatron_runtime.model.experts.routing import ExpertRouter, make_router
from megatron_runtime.model.formats.config_fields import ConfigFields, read_json
from megatron_runtime.model.formats.families.expert_fields import deepseek_v2_experts, deepseek_v3_experts

HIDDEN, EXPERTS, PER_TOKEN, TOKENS = 32, 16, 4, 200
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts_per_tok": PER_TOKEN, "moe_intermediate_size": 8}
DEEPSEEK = SIZES | {"n_routed_experts": EXPERTS, "num_attention_heads": 4, "num_hidden_layers": 2}
GROUPS = {"n_group": 4, "topk_group": 2}


def fields_of(config: Any, folder: Path) -> ConfigFields:
    config.save_pretrained(folder)
    path = folder / "config.json"
    return ConfigFields(path, read_json(path))


def deepseek_v2(folder: Path, **settings: Any) -> tuple[ExpertsConfig, Any]:
    config = DeepseekV2Config(**(DEEPSEEK | settings))
    return deepseek_v2_experts(fields_of(config, folder), 2), DeepseekV2TopkRouter(config)


def deepseek_v3(folder: Path, **settings: Any) -> tuple[ExpertsConfig, Any]:
    config = DeepseekV3Config(**(DEEPSEEK | settings))
    return deepseek_v3_experts(fields_of(config, folder), 2), DeepseekV3TopkRouter(config)


def glm_4_5(folder: Path) -> tuple[ExpertsConfig, Any]:
    config = Glm4MoeConfig(**DEEPSEEK, routed_scaling_factor=1.5)
    return deepseek_v3_experts(fields_of(config, folder), 2), Glm4MoeTopkRouter(config)


def qwen2(_: Path) -> tuple[ExpertsConfig, Any]:
    return ExpertsConfig(EXPERTS, PER_TOKEN, 8), Qwen2MoeTopKRouter(Qwen2MoeConfig(**SIZES, num_experts=EXPERTS))


ROUTERS = {
    "qwen2": qwen2,
    "deepseek v2": lambda folder: deepseek_v2(folder, routed_scaling_factor=16.0),
    "deepseek v2 limited to groups": lambda folder: deepseek_v2(folder, topk_method="group_limited_greedy", **GROUPS),
    "deepseek v3": lambda folder: deepseek_v3(folder, **GROUPS),
    "deepseek v3 without groups": lambda folder: deepseek_v3(folder, n_group=1, topk_group=1),
    "deepseek v3 with weights as they are": lambda folder: deepseek_v3(folder, norm_topk_prob=False, **GROUPS),
    "glm 4.5": glm_4_5,
}


def copy_router(theirs: Any, experts: ExpertsConfig) -> ExpertRouter:
    ours = make_router(HIDDEN, experts, torch.float32)
    ours.linear.weight.copy_(theirs.weight)
    if ours.selection_bias is not None:
        ours.selection_bias.copy_(theirs.e_score_correction_bias)
    return ours


def randomize(router: Any) -> None:
    torch.manual_seed(0)
    torch.nn.init.normal_(router.weight, std=0.3)
    if hasattr(router, "e_score_correction_bias"):
        torch.nn.init.normal_(router.e_score_correction_bias, std=0.5)


def per_expert(chosen: Tensor, weights: Tensor) -> Tensor:
    """[T, experts], zero for experts that aren't selected."""
    return torch.zeros(len(chosen), EXPERTS).scatter(1, chosen, weights.float())


@pytest.mark.parametrize("name", ROUTERS)
@torch.inference_mode()
def test_experts_and_weights_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    experts, theirs = ROUTERS[name](tmp_path)
    randomize(theirs)
    hidden = torch.randn(TOKENS, HIDDEN)
    _, weights, chosen = theirs(hidden)
    routing = copy_router(theirs, experts)(hidden)
    assert routing.chosen.sort().values.equal(chosen.sort().values)
    torch.testing.assert_close(per_expert(routing.chosen, routing.weights), per_expert(chosen, weights))


@torch.inference_mode()
def test_llama_4_chooses_by_logits_even_where_their_sigmoids_are_alike() -> None:
    theirs = Llama4Router(Llama4TextConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=1))
    randomize(theirs)
    hidden = torch.cat((torch.randn(TOKENS, HIDDEN), 100.0 * torch.randn(TOKENS, HIDDEN)))
    expected, logits = theirs(hidden)
    assert (torch.sigmoid(logits) == 1.0).sum(-1).amax() > 1
    experts = ExpertsConfig(EXPERTS, 1, 8, RoutingConfig(scores="sigmoid", weights_inputs=True))
    routing = copy_router(theirs, experts)(hidden)
    torch.testing.assert_close(per_expert(routing.chosen, routing.weights), expected)


@torch.inference_mode()
def test_the_selection_bias_changes_the_choice_and_not_the_weights() -> None:
    experts = ExpertsConfig(4, 2, 8, RoutingConfig(scores="sigmoid", has_selection_bias=True))
    router = make_router(1, experts, torch.bfloat16)
    router.linear.weight.copy_(torch.tensor([[3.0], [2.0], [1.0], [-1.0]]))
    assert router.selection_bias is not None
    router.selection_bias.copy_(torch.tensor([-1.0, 0.0, 0.0, 1.0]))
    routing = router(torch.ones(1, 1, dtype=torch.bfloat16))
    assert routing.chosen.tolist() == [[3, 1]]
    torch.testing.assert_close(routing.weights, torch.tensor([[-1.0, 2.0]]).sigmoid())


@torch.inference_mode()
def test_a_router_in_float32_resolves_what_bfloat16_does_not() -> None:
    for in_float32, expected in ((True, 1), (False, 0)):
        router = make_router(2, ExpertsConfig(2, 1, 8, RoutingConfig(in_float32=in_float32)), torch.bfloat16)
        router.linear.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 2**-10]]))
        routing = router(torch.ones(1, 2, dtype=torch.bfloat16))
        assert routing.chosen.tolist() == [[expected]]


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        (ExpertsConfig(8, 9, 8), "number of experts per token is 9, expected 1 to 8"),
        (
            ExpertsConfig(8, 2, 8, RoutingConfig(groups=3)),
            "number of expert groups is 3, expected a divisor of 8 experts that leaves at least 1 in each group",
        ),
        (ExpertsConfig(8, 2, 8, RoutingConfig(groups=8, group_scores="top_2_sum")), "leaves at least 2 in each group"),
        (ExpertsConfig(8, 2, 8, RoutingConfig(groups=0)), "number of expert groups is 0"),
        (
            ExpertsConfig(8, 5, 8, RoutingConfig(groups=4, groups_per_token=2)),
            "number of expert groups per token is 2, expected 3 to 4 for 5 experts per token",
        ),
        (ExpertsConfig(8, 2, 8, RoutingConfig(groups=4, groups_per_token=5)), "is 5, expected 1 to 4"),
    ],
)
def test_routing_that_cannot_work_is_refused(experts: ExpertsConfig, said: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: .*{said}"):
        experts.check("config.json")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"topk_method": "random"}, "topk_method is 'random', the known ones are greedy and group_limited_greedy"),
        ({"norm_topk_prob": True}, "norm_topk_prob is True, only False is supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2, only 1 is supported"),
        ({"topk_method": "group_limited_greedy"}, "n_group is missing"),
    ],
)
def test_unsupported_values_of_deepseek_v2_fields_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        deepseek_v2_experts(ConfigFields(Path("config.json"), DEEPSEEK | fields), 2)


def test_the_first_layers_are_dense() -> None:
    fields = {"routed_scaling_factor": 2.5, "first_k_dense_replace": 3} | GROUPS
    experts = deepseek_v3_experts(ConfigFields(Path("config.json"), DEEPSEEK | fields), 5)
    assert experts.dense_layers == {0, 1, 2}
