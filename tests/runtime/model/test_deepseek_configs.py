"""The published configurations of DeepSeek and Kimi, and unsupported ones of these families."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support.reference_models import CLOSE, logits_of
from safetensors.torch import load_file, save_file

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.attention_kind import attention_kind
from megatron_runtime.model.cache_layout import CacheLayout
from megatron_runtime.model.checkpoint import inspect_checkpoint, load_model
from megatron_runtime.model.config import ModelConfig
from megatron_runtime.model.formats.hugging_face_config import hugging_face_config

V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
}
KIMI_K2 = V3 | {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "routed_scaling_factor": 2.827,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
    "rope_scaling": V3["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0},
}
V2_LITE = V3 | {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": None,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "rope_scaling": V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
SMALL = {
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def read_config(folder: Path, fields: dict[str, Any]) -> ModelConfig:
    """The configuration from a ``config.json`` with only ``fields``."""
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return hugging_face_config(path)


@pytest.mark.parametrize(
    ("fields", "layers", "dense", "magnitude"),
    [
        (V3, 61, 3, 0.1 * math.log(40) + 1),
        (KIMI_K2, 61, 1, 0.1 * math.log(32) + 1),
        (V2_LITE, 27, 1, 0.0707 * math.log(40) + 1),
    ],
    ids=["deepseek-v3", "kimi-k2", "deepseek-v2-lite"],
)
def test_published_configurations_are_read(
    fields: dict[str, Any], layers: int, dense: int, magnitude: float, tmp_path: Path
) -> None:
    config = read_config(tmp_path, fields)
    assert attention_kind(config).cache_layout == CacheLayout(
        layers, heads=1, key_width=576, value_width=512, values_in_keys=True
    )
    assert (config.head_dim, config.rotary_dim) == (192, 64)
    assert config.rope_scaling.magnitude == 1.0
    assert config.attention_scale == pytest.approx(magnitude**2 / math.sqrt(192))
    assert config.max_position_embeddings == fields["max_position_embeddings"]
    assert config.experts is not None
    assert config.experts.count == fields["n_routed_experts"]
    assert config.experts_of(dense - 1) is None
    assert config.experts_of(dense) is config.experts


def test_kimi_k2_is_deepseek_v3_under_another_name(tmp_path: Path, paged_requests: Any, save_model: Any) -> None:
    model = save_model(tmp_path, "DeepseekV3", **SMALL)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "kimi_k2"}))
    tokens = list(range(1, 30))
    ours = paged_requests(load_model(tmp_path, dtype="float32")).forward({"it": tokens})["it"]
    torch.testing.assert_close(ours, logits_of(model, tokens), **CLOSE)


@pytest.mark.parametrize("family", ["DeepseekV2", "DeepseekV3"])
def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(
    family: str, tmp_path: Path, paged_requests: Any, save_model: Any
) -> None:
    model = save_model(tmp_path, family, **SMALL).bfloat16()
    model.save_pretrained(tmp_path)
    tokens = list(range(1, 30))
    exact = logits_of(model.float(), tokens)
    allowed = (logits_of(model.bfloat16(), tokens) - exact).abs()
    ours = paged_requests(load_model(tmp_path, dtype="bfloat16")).forward({"it": tokens})["it"]
    assert (ours - exact).abs().mean() <= 2 * allowed.mean()


def test_parameters_are_counted_as_transformers_counts_them(tmp_path: Path, save_model: Any) -> None:
    model = save_model(tmp_path, "DeepseekV2", **SMALL)
    assert inspect_checkpoint(tmp_path).num_parameters == model.num_parameters()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank is missing, expected an integer"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0, expected 1 to"),
        ({"q_lora_rank": -1}, "q_lora_rank is -1, expected 1 to"),
        ({"v_head_dim": 2**40}, "v_head_dim is 1,099,511,627,776, expected 1 to"),
        ({"qk_nope_head_dim": -64}, "qk_nope_head_dim is -64, expected 1 to"),
        ({"qk_rope_head_dim": 63}, "head dimension is 191, expected an even number"),
        ({"qk_rope_head_dim": 63, "qk_nope_head_dim": 129}, "63 channels of a head are rotated, expected an even"),
        ({"rope_interleave": "yes"}, "rope_interleave is 'yes', expected true or false"),
        ({"num_attention_heads": 0}, "number of attention heads is 0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_unsupported_configuration_is_refused_by_its_field(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)):
        read_config(tmp_path, V3 | fields)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path, save_model: Any) -> None:
    save_model(tmp_path, "DeepseekV3", **SMALL)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    save_file(tensors | {name: tensors[name][1:].contiguous()}, path)
    with pytest.raises(CheckpointError, match=rf"tensor {name} has shape \[55, 16\], .* expects \[56, 16\]"):
        inspect_checkpoint(tmp_path)
