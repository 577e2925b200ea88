"""A small byte-level Llama with random weights, without a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from runtime_support.byte_backend import END

from megatron_runtime.model.config import LatentAttentionConfig, ModelConfig
from megatron_runtime.model.decoder import Decoder


def random_llama(
    *,
    hidden: int,
    intermediate: int,
    std: float,
    dtype: torch.dtype = torch.float32,
    latent_attention: LatentAttentionConfig | None = None,
    **changes: Any,
) -> Decoder:
    """Two layers of four heads; matrices are normal with ``std``, and norms are ones.

    With ``latent_attention`` instead of grouped-query attention; ``changes`` are other fields of the configuration.
    """
    latent = latent_attention
    config = ModelConfig(
        architecture="llama",
        vocab_size=END + 1,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=2,
        num_attention_heads=4,
        num_kv_heads=2 if latent is None else 4,
        head_dim=hidden // 4 if latent is None else latent.qk_nope_head_dim + latent.qk_rope_head_dim,
        rotary_dim=None if latent is None else latent.qk_rope_head_dim,
        latent_attention=latent,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
    )
    model = Decoder(replace(config, **changes), dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    assert model.embedding is not None
    assert model.head is not None
    tables, others = (model.embedding.table, model.head.table), (model.layers, model.head.norm)
    for parameter in (*tables, *(parameter for module in others for parameter in module.parameters())):
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.copy_(torch.empty(parameter.shape).normal_(std=std, generator=generator))
    return model
