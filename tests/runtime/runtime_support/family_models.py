"""The sizes and settings of small models of every family, by name: the class of transformers, and what differs."""

from __future__ import annotations

from typing import Any

from runtime_support.reference_models import LLAMA_3, LONG_ROPE

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
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 20,
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
OLMO_3_ROPE = {
    "full_attention": YARN | {"attention_factor": 1.2},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
MINISTRAL_3_ROPE = YARN | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.1}
MINIMAX_M2 = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8}
LLAMA_4 = {
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "moe_layers": [0, 2],
    "attention_chunk_size": 7,
    "no_rope_layers": [1, 0, 1],
    "floor_scale": 8,
}
GPT_OSS = {
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "swiglu_limit": 0.5,
    "rope_parameters": YARN | {"truncate": False},
}
QWEN_3_5 = {
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
QWEN_3_NEXT = EXPERTS | SHARED | QWEN_3_5
NEMOTRON_H = {
    "layers_block_type": ["mamba", "mlp", "attention", "moe"],
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 10,
    "ssm_state_size": 12,
    "n_groups": 2,
    "n_routed_experts": 6,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}
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
    "falcon 3": (
        "Llama",
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1000042.0}, "rms_norm_eps": 1e-6},
    ),
    "mistral with a sliding window": ("Mistral", {"sliding_window": 7, "head_dim": 8}),
    "mistral without a window": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "ministral": ("Ministral", {"sliding_window": 7, "head_dim": 8, "layer_types": LAYER_TYPES}),
    "ministral 3": ("Ministral3", {"head_dim": 8, "rope_parameters": MINISTRAL_3_ROPE}),
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
    "phi-4": ("Phi3", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0}}),
    "phi-4-mini": ("Phi3", {"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": PARTIAL}),
    "phi3 with a window": ("Phi3", {"sliding_window": 7}),
    "phi3 that rotates a part of each head": ("Phi3", {"head_dim": 8, "rope_parameters": PARTIAL}),
    "phi3 with longrope within its original length": (
        "Phi3",
        {"rope_parameters": LONG_ROPE | {"original_max_position_embeddings": 128}, "max_position_embeddings": 128},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 6, "layer_types": LAYER_TYPES, "rope_parameters": OLMO_3_ROPE}),
    "seed-oss": ("SeedOss", {"head_dim": 16}),
    "seed-oss with other biases": (
        "SeedOss",
        {"head_dim": 8, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "starcoder2": ("Starcoder2", {}),
    "starcoder2 with a window and without biases": ("Starcoder2", {"sliding_window": 7, "use_bias": False}),
    "glm 4": ("Glm4", {"head_dim": 16}),
    "cohere": ("Cohere", {}),
    "cohere with norms of queries and keys": ("Cohere", {"use_qk_norm": True, "logit_scale": 0.25}),
    "cohere2": ("Cohere2", {"sliding_window": 6, "layer_types": LAYER_TYPES, "attention_bias": True}),
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
    "qwen3-next": ("Qwen3Next", QWEN_3_NEXT),
    "qwen3-next with other experts, taps and biases": (
        "Qwen3Next",
        QWEN_3_NEXT
        | {"mlp_only_layers": [1], "norm_topk_prob": False, "linear_conv_kernel_dim": 2, "attention_bias": True},
    ),
    "qwen3-next with one value head per key head": (
        "Qwen3Next",
        QWEN_3_NEXT | {"layer_types": None, "full_attention_interval": 3, "linear_num_value_heads": 2},
    ),
    "qwen3.5": ("Qwen3_5", QWEN_3_5),
    "qwen3.5 with a tied head, other taps and biases": (
        "Qwen3_5",
        QWEN_3_5 | {"tie_word_embeddings": True, "linear_conv_kernel_dim": 2, "attention_bias": True},
    ),
    "qwen3.5 with one value head per key head": (
        "Qwen3_5",
        QWEN_3_5 | {"layer_types": None, "full_attention_interval": 3, "linear_num_value_heads": 2},
    ),
    "qwen3.5 with experts": ("Qwen3_5Moe", EXPERTS | SHARED | QWEN_3_5),
    "nemotron-h": ("NemotronH", NEMOTRON_H),
    "nemotron-h without experts and with biases": (
        "NemotronH",
        NEMOTRON_H
        | {
            "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"],
            "use_bias": True,
            "mlp_bias": True,
            "n_groups": 1,
        },
    ),
    "nemotron-h without biases and with groups of experts": (
        "NemotronH",
        NEMOTRON_H
        | {
            "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba", "mamba"],
            "use_conv_bias": False,
            "conv_kernel": 3,
            "n_groups": 4,
        }
        | {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": False},
    ),
    "minimax m2": ("MiniMaxM2", MINIMAX_M2),
    "llama 4": ("Llama4", LLAMA_4),
    "llama 4 without norms of queries and keys": (
        "Llama4",
        LLAMA_4 | {"use_qk_norm": False, "attn_temperature_tuning": False, "num_experts_per_tok": 2},
    ),
    "gpt-oss": ("GptOss", GPT_OSS),
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
