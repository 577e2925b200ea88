"""The models of the checkpoints in ``tests/runtime/data/megatron``, for write_megatron_checkpoints.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

VOCABULARY = 29
PADDED_VOCABULARY = 32

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 8,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",
}
APART = {"singleton_local_shards": True}
"""The option of newer versions for a tensor per layer, expert, and half of a gated matrix."""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3_EXPERTS = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
QWEN2_EXPERTS = QWEN3_EXPERTS | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "norm_topk_prob": False,
    "shared_expert_intermediate_size": 12,
}
SHARED_EXPERT = {
    "add_qkv_bias": True,
    "moe_shared_expert_intermediate_size": 12,
    "moe_shared_expert_gate": True,
    "moe_router_pre_softmax": True,
}
GLM_4_5 = LLAMA | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
SIGMOID_ROUTING = {
    "kv_channels": 8,
    "qk_layernorm": True,
    "moe_layer_freq": [0, 1],
    "num_moe_experts": 8,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 1,
    "moe_router_topk_scaling_factor": 1.5,
    "moe_shared_expert_intermediate_size": 16,
}
DEEPSEEK_V2 = LLAMA | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "rms_norm_eps": 1e-6,
    "q_lora_rank": None,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": None,
}
LATENTS = {
    "layernorm_epsilon": 1e-6,
    "qk_layernorm": True,
    "q_lora_rank": None,
    "kv_lora_rank": 12,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 5,
    "rope_type": "rope",
}
DEEPSEEK_V3 = DEEPSEEK_V2 | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 10,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 1.4,
        "original_max_position_embeddings": 16,
    },
    **{name: GLM_4_5[name] for name in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")},
    **{name: GLM_4_5[name] for name in ("n_shared_experts", "n_group", "topk_group", "routed_scaling_factor")},
    "first_k_dense_replace": 1,
}
LATENTS_OF_QUERIES = LATENTS | {
    "q_lora_rank": 10,
    "rope_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.707,
    "mscale_all_dim": 1.4,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu",
    "eos_token_id": None,
    "bos_token_id": None,
}
PLAIN = {
    "num_query_groups": 4,
    "ffn_hidden_size": 64,
    "gated_linear_unit": False,
    "activation_func": torch.nn.functional.gelu,
    "add_bias_linear": True,
    "normalization": "LayerNorm",
}


@dataclass(frozen=True)
class Case:
    """A checkpoint: the same model in the configurations of Megatron and Hugging Face, and how it is saved."""

    hugging_face: dict[str, Any]
    transformer: dict[str, Any] = field(default_factory=dict)
    """Differences from the defaults of `transformer_config`."""
    metadata: dict[str, Any] | None = None
    ranks: int = 1
    """Tensor parallel ranks; expert parallel ranks of a mixture of experts."""
    training: bool = False
    """Whether it is saved like a training run: in the folder of its iteration, with the optimizer and other state."""

    @property
    def tensor_ranks(self) -> int:
        return 1 if "num_moe_experts" in self.transformer else self.ranks

    @property
    def expert_ranks(self) -> int:
        return self.ranks // self.tensor_ranks


CASES = {
    "training": Case(LLAMA, training=True),
    "apart": Case(QWEN3, {"qk_layernorm": True}, APART),
    "two_ranks": Case(QWEN2, {"add_qkv_bias": True}, ranks=2),
    "experts": Case(QWEN3_EXPERTS, {"qk_layernorm": True} | EXPERTS),
    "experts_two_ranks": Case(QWEN3_EXPERTS, {"qk_layernorm": True} | EXPERTS, ranks=2),
    "experts_apart": Case(
        QWEN3_EXPERTS | {"mlp_only_layers": [0]}, {"qk_layernorm": True, "moe_layer_freq": [0, 1]} | EXPERTS, APART
    ),
    "shared_experts": Case(QWEN2_EXPERTS, EXPERTS | SHARED_EXPERT),
    "sigmoid_routing": Case(GLM_4_5, EXPERTS | SIGMOID_ROUTING),
    "sigmoid_routing_apart": Case(GLM_4_5, EXPERTS | SIGMOID_ROUTING, APART),
    "latents": Case(DEEPSEEK_V2, LATENTS),
    "latents_two_ranks": Case(DEEPSEEK_V2, LATENTS, ranks=2),
    "latents_of_queries": Case(DEEPSEEK_V3, EXPERTS | SIGMOID_ROUTING | LATENTS_OF_QUERIES, APART),
    "gpt2": Case(GPT2, PLAIN),
}
