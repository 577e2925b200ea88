"""A mixture-of-experts layer equals that of transformers; the attention of the family is not considered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support.reference_models import CLOSE
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config, Llama4TextConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from megatron_runtime.model.config import ExpertsConfig, ModelConfig, RoutingConfig
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.formats.config_fields import ConfigFields, read_json
from megatron_runtime.model.formats.families.expert_fields import deepseek_v2_experts, deepseek_v3_experts

DENSE = ModelConfig(
    architecture="llama",
    vocab_size=29,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)
DEEPSEEK: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 0,
}
LLAMA_4: dict[str, Any] = {"hidden_size": 32, "num_local_experts": 6, "num_experts_per_tok": 1, "intermediate_size": 20}


def fields_of(config: Any, folder: Path) -> ConfigFields:
    config.save_pretrained(folder)
    return ConfigFields(folder / "config.json", read_json(folder / "config.json"))


def deepseek_v2(folder: Path) -> tuple[ExpertsConfig, Any]:
    config = DeepseekV2Config(**DEEPSEEK, topk_method="group_limited_greedy", routed_scaling_factor=4.0)
    return deepseek_v2_experts(fields_of(config, folder), 1), DeepseekV2Moe(config)


def deepseek_v3(folder: Path) -> tuple[ExpertsConfig, Any]:
    config = DeepseekV3Config(**DEEPSEEK)
    return deepseek_v3_experts(fields_of(config, folder), 1), DeepseekV3MoE(config)


def llama_4(_: Path) -> tuple[ExpertsConfig, Any]:
    routing = RoutingConfig(scores="sigmoid", weights_inputs=True)
    return ExpertsConfig(6, 1, 20, routing, shared_intermediate_size=20), Llama4TextMoe(Llama4TextConfig(**LLAMA_4))


LAYERS = {"deepseek v2": deepseek_v2, "deepseek v3": deepseek_v3, "llama 4": llama_4}


def tensors_of(layer: Any) -> dict[str, Tensor]:
    """The tensors of a layer of transformers by their names in a checkpoint of DeepSeek."""
    gate_up, down = layer.experts.gate_up_proj, layer.experts.down_proj
    router, shared = (getattr(layer, "gate", None), getattr(layer, "shared_experts", None))
    if isinstance(layer, Llama4TextMoe):  # which stores its matrices transposed
        gate_up, down = gate_up.mT, down.mT
        router, shared = layer.router, layer.shared_expert
    named = {"gate.weight": router.weight}
    if hasattr(router, "e_score_correction_bias"):
        named["gate.e_score_correction_bias"] = router.e_score_correction_bias
    for number, (widening, narrowing) in enumerate(zip(gate_up, down, strict=True)):
        gate, up = widening.chunk(2)
        matrices = {"gate_proj": gate, "up_proj": up, "down_proj": narrowing}
        named |= {f"experts.{number}.{name}.weight": matrix for name, matrix in matrices.items()}
    named |= {f"shared_experts.{name}": parameter for name, parameter in shared.named_parameters()}
    return {f"model.layers.0.mlp.{name}": tensor for name, tensor in named.items()}


@pytest.mark.parametrize("name", LAYERS)
@torch.inference_mode()
def test_a_layer_equals_that_of_transformers(name: str, tmp_path: Path) -> None:
    experts, layer = LAYERS[name](tmp_path)
    torch.manual_seed(0)
    for tensor in [*layer.parameters(), *layer.buffers()]:
        torch.nn.init.normal_(tensor, std=0.3)
    decoder = Decoder(replace(DENSE, experts=experts), dtype=torch.float32)
    destinations = {name: view for name, view in decoder.destinations().items() if ".mlp." in name}
    tensors = tensors_of(layer)
    assert destinations.keys() == tensors.keys()
    for tensor_name, tensor in tensors.items():
        destinations[tensor_name].copy_(tensor)
    hidden = torch.randn(50, 32)
    expected = layer(hidden[None])
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(decoder.layers[0].feed_forward(hidden), expected.view(50, 32), **CLOSE)
