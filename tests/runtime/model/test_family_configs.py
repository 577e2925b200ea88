"""The configurations of the families, in newer and older spelling, and the errors of unsupported ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from runtime_support.reference_models import CLOSE, EXPERTS, LONG_ROPE, SIZES, logits_of
from safetensors.torch import load_file, save_file

from megatron_runtime.errors import CheckpointError
from megatron_runtime.model.checkpoint import inspect_checkpoint, load_model
from megatron_runtime.model.config import ClampedGate, ModelConfig
from megatron_runtime.model.formats.hugging_face_config import hugging_face_config

QWEN_2 = EXPERTS | {"shared_expert_intermediate_size": 24}
NEWER: dict[str, dict[str, Any]] = {
    "Cohere2": {"sliding_window": 6, "sliding_window_pattern": 2},
    "Llama4": {"num_local_experts": 4, "intermediate_size_mlp": 24, "attention_chunk_size": 7},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
}
NEMOTRON_H = {
    "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
}
GLM_4_5 = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 2,
    "topk_group": 1,
}


def read_config(folder: Path, fields: dict[str, Any]) -> ModelConfig:
    """The configuration from a ``config.json`` with only ``fields``."""
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return hugging_face_config(path)


def plain(model_type: str, **fields: Any) -> dict[str, Any]:
    return SIZES | {"model_type": model_type} | fields


def test_longrope_beyond_the_original_length_uses_the_long_factors(
    tmp_path: Path, paged_requests: Any, save_model: Any
) -> None:
    model = save_model(tmp_path, "Phi3", rope_parameters=LONG_ROPE)
    tokens = list(range(1, 41))
    ours = paged_requests(load_model(tmp_path, dtype="float32")).forward({"it": tokens})["it"]
    torch.testing.assert_close(ours, logits_of(model, tokens), **CLOSE)


def test_longrope_served_at_the_original_length_uses_the_short_factors(
    tmp_path: Path, paged_requests: Any, save_model: Any
) -> None:
    model = save_model(tmp_path, "Phi3", rope_parameters=LONG_ROPE)
    tokens = list(range(1, 17))
    ours = paged_requests(load_model(tmp_path, max_sequence_length=16, dtype="float32")).forward({"it": tokens})["it"]
    torch.testing.assert_close(ours, logits_of(model, tokens), **CLOSE)


def test_a_table_of_learned_positions_is_read_whole_whatever_length_is_served(tmp_path: Path, save_model: Any) -> None:
    save_model(tmp_path, "GPT2")
    decoder = load_model(tmp_path, max_sequence_length=16, dtype="float32")
    assert decoder.config.max_position_embeddings == 16
    assert decoder.embedding.learned_positions is not None
    assert len(decoder.embedding.learned_positions) == 64


def test_a_checkpoint_saved_without_its_head_is_read_under_the_names_it_has(
    tmp_path: Path, paged_requests: Any, random_model: Any
) -> None:
    body = random_model("GPT2", kind="Model")
    body.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert "wte.weight" in tensors
    save_file(tensors | {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64) for layer in range(3)}, path)
    model = transformers.GPT2LMHeadModel(body.config).eval()
    model.transformer.load_state_dict(body.state_dict())
    model.tie_weights()
    tokens = list(range(1, 30))
    ours = paged_requests(load_model(tmp_path, dtype="float32")).forward({"it": tokens})["it"]
    torch.testing.assert_close(ours, logits_of(model, tokens), **CLOSE)


def test_gemma_3_in_its_older_spelling_is_the_same_configuration(tmp_path: Path) -> None:
    older = plain(
        "gemma3_text",
        hidden_activation="gelu_pytorch_tanh",
        rope_theta=1e6,
        rope_local_base_freq=20000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window=7,
        sliding_window_pattern=2,
        query_pre_attn_scalar=64,
    )
    config = read_config(tmp_path, older)
    assert config.layer_windows == (7, None, 7)
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 20000.0)
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("linear", 8.0)
    assert config.attention_scale == 0.125
    assert config.tie_word_embeddings


def test_fields_that_large_gemma_3_models_omit_have_their_defaults(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    config = read_config(tmp_path, {"model_type": "gemma3", "text_config": text | {"sliding_window": 1024}})
    assert (config.num_attention_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.vocab_size == 262208
    assert config.layer_windows[:6] == (1024, 1024, 1024, 1024, 1024, None)


def test_falcon_3_is_a_llama_of_wide_heads(tmp_path: Path) -> None:
    falcon = {
        "model_type": "llama",
        "hidden_size": 3072,
        "head_dim": 256,
        "num_attention_heads": 12,
        "vocab_size": 131072,
    }
    sizes = {"intermediate_size": 23040, "num_hidden_layers": 28, "num_key_value_heads": 4, "rope_theta": 1000042}
    config = read_config(tmp_path, falcon | sizes | {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6})
    assert (config.head_dim, config.queries_per_kv_head, config.rope_theta) == (256, 3, 1000042.0)
    assert config.layer_windows == ()
    assert not any((config.qkv_bias, config.mlp_bias, config.tie_word_embeddings))


def test_llama_4_in_its_older_spelling_is_the_same_configuration(tmp_path: Path) -> None:
    older = plain("llama4_text", num_hidden_layers=8, num_local_experts=4, no_rope_layers=[], attn_temperature_tuning=4)
    config = read_config(tmp_path, older | {"interleave_moe_layer_step": 2, "use_qk_norm": False})
    assert config.unrotated_layers == {3, 7}
    assert config.layer_windows == (8192, 8192, 8192, None) * 2
    assert config.query_temperature is not None
    assert config.query_key_norm == "none"
    assert config.experts is not None
    assert config.experts.dense_layers == {0, 2, 4, 6}


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    rope = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    published = plain("gpt_oss", num_local_experts=32, rope_scaling=rope | {"rope_type": "yarn", "truncate": False})
    fields = published | {"rope_theta": 150000, "max_position_embeddings": 131072, "sliding_window": 128}
    config = read_config(tmp_path, fields | {"swiglu_limit": 7.0, "experts_per_token": 4})
    assert config.layer_windows == (128, None, 128)
    assert (config.rope_theta, config.max_position_embeddings) == (150000.0, 131072)
    assert config.rope_scaling.magnitude == pytest.approx(1.34657, abs=1e-5)
    assert config.clamped_gate == ClampedGate(1.702, 7.0)
    assert config.experts is not None
    assert config.experts.per_token == 4
    assert read_config(tmp_path, fields | {"rope_scaling": None}).rope_scaling == config.rope_scaling


def test_smollm3_without_a_list_has_no_rotation_in_every_fourth_layer(tmp_path: Path) -> None:
    config = read_config(tmp_path, plain("smollm3", num_hidden_layers=8))
    assert config.unrotated_layers == {3, 7}
    assert config.rope_theta == 2e6


def test_phi_3_spells_longrope_in_four_ways(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    for named in ({"type": "su"}, {"type": "yarn"}, {"type": "longrope"}, {"rope_type": "longrope"}):
        fields = plain("phi3", rope_scaling=named | factors, original_max_position_embeddings=16)
        scaling = read_config(tmp_path, fields).rope_scaling
        assert (scaling.kind, scaling.factor, scaling.original_max_position_embeddings) == ("longrope", 4.0, 16)
        assert scaling.magnitude == pytest.approx(1.5**0.5)


def test_yarn_serves_the_length_that_it_stretches_the_model_to(tmp_path: Path) -> None:
    older = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read_config(tmp_path, plain("qwen2", rope_scaling=older)).max_position_embeddings == 256
    config = read_config(tmp_path, plain("qwen2", rope_scaling={"type": "yarn"}, max_position_embeddings=96))
    assert (config.rope_scaling.original_max_position_embeddings, config.rope_scaling.factor) == (96, 1.0)
    longer = plain("qwen3", rope_scaling=older, max_position_embeddings=512)
    assert read_config(tmp_path, longer).max_position_embeddings == 512


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (plain("gemma2", query_pre_attn_scalar=0), "query_pre_attn_scalar is 0.0, expected a number above 0"),
        (plain("gemma3_text", use_bidirectional_attention=True), "use_bidirectional_attention is True, only False is"),
        (
            plain("gemma3_text", rope_parameters={"sliding_attention": {"rope_type": "linear"}}),
            "rope_type is 'linear', only 'default' is supported",
        ),
        (plain("gemma3_text", layer_types=["full_attention"] * 2), "the windows of 2 layers are given, expected 3"),
        (
            plain("olmo3", rope_parameters={"sliding_attention": {"rope_type": "yarn"}}),
            "rope_type is 'yarn', only 'defa",
        ),
        (plain("llama4_text", num_local_experts=4, layer_types=["full"]), "'full', expected chunked_attention or full"),
        (plain("gpt_oss", num_local_experts=4, sliding_window=-1), "attention window is -1, expected 1 or more tokens"),
        (
            plain("llama4_text", num_local_experts=4, floor_scale=0.5),
            "interval of the query temperature is 0, expected 1 or",
        ),
        (plain("cohere2", use_parallel_block=False), "use_parallel_block is False, only True is supported"),
        (plain("minimax_m2", scoring_func="softmax"), "scoring_func is 'softmax', only 'sigmoid' is supported"),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "t5"}},
            "text_config: architecture 't5' is not known",
        ),
        (plain("minimax"), "architecture 'minimax' is not known"),
        (plain("qwen3_vl"), "architecture 'qwen3_vl' is not known"),
        (plain("qwen3_5_text", attn_output_gate=False), "attn_output_gate is False, only True is supported"),
        (plain("qwen3_5_text", layer_types=["full_attention"]), "layer_types has 1 entries, expected 3"),
        ({"model_type": "qwen3_5_moe"}, "num_attention_heads is missing, expected an integer"),
        (plain("gemma2", layer_types=["chunked"]), "layer_types holds 'chunked', expected sliding_attention or full"),
        (plain("smollm3", no_rope_layers=[1, 0]), "no_rope_layers has 2 entries, expected 3"),
        (plain("smollm3", no_rope_layers=[1, "no", 1]), "no_rope_layers is 'no', expected an integer"),
        (plain("olmoe", num_experts=4, clip_qkv=-8.0), "clip_qkv is -8.0, expected a number above 0"),
        (plain("mixtral"), "num_local_experts is missing, expected an integer"),
        (plain("qwen3_moe", **EXPERTS | {"num_experts_per_tok": 5}), "experts per token is 5, expected 1 to 4"),
        (plain("qwen3_moe", **EXPERTS | {"moe_intermediate_size": 0}), "intermediate size of an expert is 0, expected"),
        (plain("qwen2_moe", **QWEN_2, use_sliding_window=True), "use_sliding_window is True, only False is supported"),
        (
            plain("qwen2_moe", **QWEN_2 | {"shared_expert_intermediate_size": -1}),
            "intermediate size of the shared expert is -1, expected 1 to",
        ),
        (plain("qwen2_moe", **EXPERTS), "shared_expert_intermediate_size is missing, expected an integer"),
        (plain("glm4_moe", **GLM_4_5 | {"n_group": 3}), "number of expert groups is 3, expected a divisor of 4"),
        (plain("glm4_moe", **GLM_4_5 | {"n_group": None}), "n_group is missing, expected an integer"),
        (
            plain("glm4_moe", **GLM_4_5, scoring_func="softmax"),
            "scoring_func is 'softmax', only 'sigmoid' is supported",
        ),
        (
            plain("glm4_moe", **GLM_4_5, num_nextn_predict_layers=10**9),
            "number of prediction layers is 1,000,000,000, expected 0 to 3",
        ),
        (plain("phi3", partial_rotary_factor=0.7), "5 channels of a head are rotated, expected an even number up to 8"),
        (
            plain("phi3", rope_scaling=LONG_ROPE | {"long_factor": [1.0]}),
            "longrope has 1 factors for 4 rotary frequencies",
        ),
        (plain("llama", num_hidden_layers=10**12), "number of layers is 1,000,000,000,000, expected 1 to 1,048,576"),
        (plain("mamba"), "architecture 'mamba' is not known; the known ones are llama, mistral, ministral, ministral3"),
        (
            {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 5, "n_positions": 0},
            "maximum sequence length is 0",
        ),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_an_unsupported_configuration_is_refused_by_its_field(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)):
        read_config(tmp_path, fields)


def test_a_missing_expert_is_named(tmp_path: Path, save_model: Any) -> None:
    save_model(tmp_path, "Qwen3Moe", **EXPERTS)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"tensor model.layers.1.mlp.experts.3.up_proj.weight missing"):
        inspect_checkpoint(tmp_path)


def test_a_configuration_with_more_experts_than_tensors_allocates_no_memory(tmp_path: Path, save_model: Any) -> None:
    save_model(tmp_path, "Mixtral", num_local_experts=4)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_local_experts": 10**7}))
    with pytest.raises(CheckpointError, match="10,000,000 experts expected by the configuration, but only"):
        inspect_checkpoint(tmp_path)


def test_experts_are_counted_as_transformers_counts_them(tmp_path: Path, save_model: Any) -> None:
    model = save_model(tmp_path, "Qwen3Moe", **EXPERTS)
    assert inspect_checkpoint(tmp_path).num_parameters == model.num_parameters()


def test_layers_that_predict_further_tokens_are_ignored(tmp_path: Path, paged_requests: Any, save_model: Any) -> None:
    model = save_model(tmp_path, "Glm4Moe", **GLM_4_5)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors |= {
        "model.layers.3.eh_proj.weight": torch.zeros(32, 64),
        "model.layers.3.mlp.gate.weight": torch.zeros(4, 32),
    }
    save_file(tensors, path)
    tokens = list(range(1, 20))
    ours = paged_requests(load_model(tmp_path, dtype="float32")).forward({"it": tokens})["it"]
    torch.testing.assert_close(ours, logits_of(model, tokens), **CLOSE)
    tensors["model.layers.4.eh_proj.weight"] = torch.zeros(32, 64)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"layers.4.eh_proj.weight found that the configuration does not have"):
        inspect_checkpoint(tmp_path)


@pytest.mark.parametrize("family", ["Gemma2", "Mixtral", "GPT2", "Granite", "Qwen2Moe", "Glm4Moe", "NemotronH", *NEWER])
def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(
    family: str, tmp_path: Path, paged_requests: Any, save_model: Any
) -> None:
    settings = {"Mixtral": {"num_local_experts": 4}, "Qwen2Moe": QWEN_2, "Glm4Moe": GLM_4_5} | NEWER
    settings["NemotronH"] = NEMOTRON_H
    extra = settings.get(family, {})
    model = save_model(tmp_path, family, **extra).bfloat16()
    model.save_pretrained(tmp_path)
    tokens = list(range(1, 30))
    exact = logits_of(model.float(), tokens)
    allowed = (logits_of(model.bfloat16(), tokens) - exact).abs()
    ours = paged_requests(load_model(tmp_path, dtype="bfloat16")).forward({"it": tokens})["it"]
    assert (ours - exact).abs().mean() <= 2 * allowed.mean()


def test_nan_and_infinity_are_found_on_request(tmp_path: Path, save_model: Any) -> None:
    save_model(tmp_path, "Llama")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.2.mlp.down_proj.weight"
    tensors[name][5, :3] = float("nan")
    save_file(tensors, path)
    load_model(tmp_path, dtype="float32")
    with pytest.raises(
        CheckpointError, match=rf"3 of the 1,536 numbers in tensor {name} are NaN or infinite as float32"
    ):
        load_model(tmp_path, check_finite=True, dtype="float32")


def test_values_beyond_the_range_of_the_dtype_are_found_on_request(tmp_path: Path, save_model: Any) -> None:
    save_model(tmp_path, "Llama")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, path)
    load_model(tmp_path, check_finite=True, dtype="float32")
    with pytest.raises(CheckpointError, match=r"1 of the 32 numbers in tensor model.norm.weight are .* as float16"):
        load_model(tmp_path, check_finite=True, dtype="float16")
