"""GPT-2 (Radford et al.)."""

from __future__ import annotations

from megatron_runtime.model.config import ModelConfig, check_num_layers
from megatron_runtime.model.formats.config_fields import MISSING, ConfigFields
from megatron_runtime.model.formats.families.llama import activation


def gpt2(fields: ConfigFields) -> ModelConfig:
    """Learned positions, LayerNorm, biases everywhere, no gates."""
    fields.refuse("scale_attn_by_inverse_layer_idx", False)
    fields.refuse("add_cross_attention", False)
    heads, hidden = fields.get("n_head", MISSING, int), fields.get("n_embd", MISSING, int)
    layers = check_num_layers(str(fields.path), fields.get("n_layer", MISSING, int))
    length = fields.get("n_positions", 1024, int)
    return ModelConfig(
        architecture="gpt2",
        vocab_size=fields.get("vocab_size", MISSING, int),
        hidden_size=hidden,
        intermediate_size=fields.get("n_inner", 4 * hidden, int),
        num_layers=layers,
        num_attention_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // max(heads, 1),
        max_position_embeddings=length,
        rms_norm_eps=fields.get("layer_norm_epsilon", 1e-5, float),
        rope_theta=10000.0,
        tie_word_embeddings=fields.get("tie_word_embeddings", True, bool),
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        norm="layer",
        activation=activation(fields, "activation_function", "gelu_new"),
        gated_feed_forward=False,
        unrotated_layers=frozenset(range(layers)),
        learned_positions=length,
        attention_scale=None if fields.get("scale_attn_weights", True, bool) else 1.0,
    )
