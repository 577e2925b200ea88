"""Small random checkpoints of every family, written by transformers, have the logits of transformers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support.reference_models import (
    CLOSE,
    LLAMA_3,
    LONG_ROPE,
    assert_most_likely,
    logits_of,
    new_model,
    selection_biases,
)

from megatron_runtime.model.checkpoint import inspect_checkpoint, load_model
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.formats.expected_tensors import expected_tensors

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
GEMMA = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA_3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {"shared_expert_intermediate_size": 40}
GLM_4_5 = {
    "head_dim": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
DEEPSEEK_V2 = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
DEEPSEEK_V3 = DEEPSEEK_V2 | {"n_group": 3, "topk_group": 2}
DENSE = {"first_k_dense_replace": 3}
DEEPSEEK_YARN = YARN | {"mscale": 0.707, "mscale_all_dim": 1.4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with a tied head": ("Llama", {"tie_word_embeddings": True}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with heads wider than the hidden size": ("Llama", {"head_dim": 16}),
    "llama with one key head per query head": ("Llama", {"num_key_value_heads": 6}),
    "llama with the rotary scaling of Llama 3": ("Llama", {"rope_parameters": LLAMA_3}),
    "llama with linear rotary scaling": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama with dynamic rotary scaling, within its length": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "mistral with a sliding window": ("Mistral", {"sliding_window": 7, "head_dim": 8}),
    "mistral without a window": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2 with a window in its upper layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2 with yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen2 with yarn between fractions of channels": (
        "Qwen2",
        {"rope_parameters": YARN | {"truncate": False, "beta_fast": 4, "beta_slow": 0.5}, "head_dim": 16},
    ),
    "qwen3 with yarn of a magnitude of its own": (
        "Qwen3",
        {"head_dim": 16, "rope_parameters": YARN | {"attention_factor": 0.8, "rope_theta": 1e6}},
    ),
    "qwen3 with yarn and two scales of magnitude": (
        "Qwen3",
        {"head_dim": 16, "rope_parameters": YARN | {"mscale": 1.5, "mscale_all_dim": 0.5}},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3 with a head of its own": ("SmolLM3", {"no_rope_layers": [0, 1, 1], "tie_word_embeddings": False}),
    "smollm3 with a window": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 6},
    ),
    "phi3": ("Phi3", {}),
    "phi3 with a window": ("Phi3", {"sliding_window": 7}),
    "phi3 that rotates a part of each head": ("Phi3", {"head_dim": 8, "rope_parameters": PARTIAL}),
    "phi3 with longrope within its original length": (
        "Phi3",
        {"rope_parameters": LONG_ROPE | {"original_max_position_embeddings": 128}, "max_position_embeddings": 128},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2 with one key head per query head": ("Olmo2", {"num_key_value_heads": 6}),
    "granite": ("Granite", {"attention_multiplier": 0.3} | GRANITE),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma2 without caps": ("Gemma2", GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3", GEMMA | {"sliding_window_pattern": 2}),
    "gemma3 with rotary scaling": ("Gemma3", GEMMA | {"layer_types": LAYER_TYPES, "rope_parameters": GEMMA_3_ROPE}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3 with experts": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": True, "head_dim": 16}),
    "qwen3 with experts in some layers": ("Qwen3Moe", EXPERTS | {"mlp_only_layers": [2], "decoder_sparse_step": 1}),
    "qwen3 with experts in every other layer": ("Qwen3Moe", EXPERTS | {"decoder_sparse_step": 2}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "olmoe with weights that sum to one": (
        "Olmoe",
        {"num_experts": 6, "norm_topk_prob": True, "num_experts_per_tok": 2},
    ),
    "olmoe with clipped queries, keys and values": (
        "Olmoe",
        {"num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 0.4},
    ),
    "qwen2 with experts": ("Qwen2Moe", EXPERTS | SHARED),
    "qwen2 with experts in some layers and weights that sum to one": (
        "Qwen2Moe",
        EXPERTS | SHARED | {"mlp_only_layers": [0], "decoder_sparse_step": 1, "norm_topk_prob": True},
    ),
    "qwen2 with experts and a window": (
        "Qwen2Moe",
        EXPERTS | SHARED | {"use_sliding_window": True, "sliding_window": 5, "layer_types": LAYER_TYPES},
    ),
    "qwen2 with experts and without biases": ("Qwen2Moe", EXPERTS | SHARED | {"qkv_bias": False}),
    "glm 4.5": ("Glm4Moe", GLM_4_5 | {"use_qk_norm": True}),
    "glm 4.5 with biases and without norms of queries and keys": ("Glm4Moe", GLM_4_5 | {"attention_bias": True}),
    "glm 4.5 with groups of experts": (
        "Glm4Moe",
        GLM_4_5 | {"n_group": 3, "topk_group": 2, "norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    "deepseek v2": ("DeepseekV2", DEEPSEEK_V2),
    "deepseek v2 with groups of experts": (
        "DeepseekV2",
        DEEPSEEK_V2 | {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
    ),
    "deepseek v2 without a latent of the queries": ("DeepseekV2", DEEPSEEK_V2 | {"q_lora_rank": None}),
    "deepseek v2 without experts and with yarn": (
        "DeepseekV2",
        DEEPSEEK_V2 | DENSE | {"rope_parameters": DEEPSEEK_YARN},
    ),
    "deepseek v3": ("DeepseekV3", DEEPSEEK_V3),
    "deepseek v3 without a latent of the queries": ("DeepseekV3", DEEPSEEK_V3 | {"q_lora_rank": None}),
    "deepseek v3 without experts and with biases": ("DeepseekV3", DEEPSEEK_V3 | DENSE | {"attention_bias": True}),
    "deepseek v3 with yarn": ("DeepseekV3", DEEPSEEK_V3 | {"rope_parameters": DEEPSEEK_YARN}),
    "deepseek v3 that rotates the halves of a head": ("DeepseekV3", DEEPSEEK_V3 | DENSE | {"rope_interleave": False}),
    "deepseek v3 of many heads and a tied head": (
        "DeepseekV3",
        DEEPSEEK_V3 | {"num_attention_heads": 24, "num_key_value_heads": 24, "tie_word_embeddings": True},
    ),
    "gpt2": ("GPT2", {}),
    "gpt2 with a head of its own and another width": ("GPT2", {"tie_word_embeddings": False, "n_inner": 56}),
    "gpt2 without scaled scores": ("GPT2", {"scale_attn_weights": False}),
}


def write_checkpoint(folder: Path, family: str, settings: dict[str, Any], **save_options: Any) -> Any:
    """Save a random model of ``family`` and read it back in float32.

    Norms and biases are random too, since ones and zeros would hide mistakes.
    """
    model = new_model(family, **(SIZES | settings))
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name or ".ln_" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
        else:
            torch.nn.init.normal_(parameter, std=0.1)
    for bias in selection_biases(model):
        torch.nn.init.normal_(bias, std=0.3)
    if dtype := save_options.pop("dtype", None):
        model.to(dtype)
    model.save_pretrained(folder, **save_options)
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


def assert_same_logits(folder: Path, model: Any, paged_requests: Any) -> None:
    """In one prefill, then in chunks beside single steps."""
    tokens = torch.randint(0, SIZES["vocab_size"], (40,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = logits_of(model, tokens)
    decoder = load_model(folder, dtype="float32")
    whole = paged_requests(decoder, num_blocks=32, block_size_tokens=4).forward({"it": tokens})["it"]
    torch.testing.assert_close(whole, expected, **CLOSE)
    requests = paged_requests(decoder, num_blocks=32, block_size_tokens=4)
    cuts = [0, 9, 10, 11, 12, 30, 31, 40]
    parts = [requests.forward({"it": tokens[a:b]})["it"] for a, b in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(parts), expected, **CLOSE)


@torch.inference_mode()
def assert_same_greedy_tokens(folder: Path, model: Any, paged_requests: Any) -> None:
    """Over 64 steps, for two requests of different length that are served together."""
    prompts = {"long": list(range(1, 31)), "short": [7, 5, 3]}
    ours = paged_requests(load_model(folder, dtype="float32")).continue_greedily(prompts, 64)
    for name, prompt in prompts.items():
        assert_most_likely(model, prompt, ours[name])


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, paged_requests: Any) -> None:
    family, settings = FAMILIES[name]
    model = write_checkpoint(tmp_path, family, settings)
    assert_same_logits(tmp_path, model, paged_requests)
    assert_same_greedy_tokens(tmp_path, model, paged_requests)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_checkpoint_in_half_precision_computes_in_float32_on_request(
    dtype: torch.dtype, tmp_path: Path, paged_requests: Any
) -> None:
    model = write_checkpoint(tmp_path, "Llama", {}, dtype=dtype)
    assert_same_logits(tmp_path, model, paged_requests)


def test_a_checkpoint_in_shards_is_the_same_model(tmp_path: Path, paged_requests: Any) -> None:
    model = write_checkpoint(tmp_path, "Llama", {}, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    assert_same_logits(tmp_path, model, paged_requests)


def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(tmp_path: Path, paged_requests: Any) -> None:
    model = write_checkpoint(tmp_path, "Llama", {}, dtype=torch.bfloat16)
    tokens = list(range(1, 30))
    exact = logits_of(model, tokens)
    rounded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    allowed = (logits_of(rounded, tokens) - exact).abs().max()
    ours = paged_requests(load_model(tmp_path, dtype="bfloat16")).forward({"it": tokens})["it"]
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().max() <= 2 * allowed


def test_the_summary_counts_what_transformers_counts(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "Llama", {"tie_word_embeddings": True}, dtype=torch.bfloat16)
    summary = inspect_checkpoint(tmp_path)
    assert summary.num_parameters == model.num_parameters()
    assert summary.weight_bytes == 2 * model.num_parameters()
    assert summary.loaded_bytes(torch.float32) == 4 * model.num_parameters()
    assert summary.config.max_position_embeddings == SIZES["max_position_embeddings"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tensors_that_a_header_is_compared_with_are_those_of_the_decoder(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *FAMILIES[name])
    config = inspect_checkpoint(tmp_path).config
    decoder = Decoder(config, dtype=torch.float32, device="meta")
    shapes = {name: tuple(view.shape) for name, view in decoder.destinations().items()}
    assert list(expected_tensors(config).items()) == list(shapes.items())


def test_logits_are_computed_only_for_requested_rows(tmp_path: Path, paged_requests: Any) -> None:
    write_checkpoint(tmp_path, "Llama", {})
    requests = paged_requests(load_model(tmp_path, dtype="float32"))
    batch = requests._batch({"a": [1, 2, 3], "b": [4]})
    every = requests.decoder(batch, requests.cache)
    last = requests.decoder(replace(batch, logit_rows=torch.tensor([2, 3])), requests.cache)
    torch.testing.assert_close(last, every[2:], **CLOSE)


@pytest.mark.parametrize("name", ["llama", "deepseek v3"])
def test_the_cache_keeps_its_contents_when_it_is_offloaded_and_restored(
    name: str, tmp_path: Path, paged_requests: Any
) -> None:
    model = write_checkpoint(tmp_path, *FAMILIES[name])
    requests = paged_requests(load_model(tmp_path, dtype="float32"))
    requests.forward({"it": [5, 6, 7]})
    requests.cache.offload(range(requests.cache.num_blocks))
    assert not requests.cache.is_resident
    requests.cache.restore()
    torch.testing.assert_close(requests.forward({"it": [8]})["it"], logits_of(model, [5, 6, 7, 8])[-1:], **CLOSE)


def test_a_released_cache_is_empty_after_its_restoration(tmp_path: Path, paged_requests: Any) -> None:
    write_checkpoint(tmp_path, "Llama", {})
    cache = paged_requests(load_model(tmp_path, dtype="float32")).cache
    keys, _ = cache.layer(0)
    keys.fill_(1.0)
    cache.release()
    assert not cache.is_resident
    cache.restore()
    assert not cache.layer(0)[0].any()


def test_the_bytes_of_a_block_are_those_of_the_pool_divided_by_its_blocks(tmp_path: Path, paged_requests: Any) -> None:
    write_checkpoint(tmp_path, "Llama", {})
    cache = paged_requests(load_model(tmp_path, dtype="float32"), num_blocks=8, block_size_tokens=16).cache
    keys, values = cache.layer(0)
    assert keys.shape == values.shape == (8, 2, 16, 8)
    per_block = cache.block_bytes(load_model(tmp_path, dtype="float32").config, 16, torch.float32)
    assert cache.num_bytes == 8 * per_block == 3 * (keys.nbytes + values.nbytes)
