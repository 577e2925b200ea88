"""A small random checkpoint that loads at once, with a byte-level tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

import torch
from runtime_support.byte_backend import END, END_TEXT, byte_backend
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)


def write_tiny_checkpoint(
    folder: Path,
    *,
    longest: int = 512,
    seed: int = 3,
    experts: int = 0,
    has_latent_attention: bool = False,
    recurrent: Literal["", "delta", "mamba"] = "",
    marks: Sequence[str] = (),
    chat_template: str | None = None,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
) -> Path:
    """Writes a Hugging Face folder whose random weights make the most likely token unambiguous.

    The model is a Llama; with experts a Mixtral; with latent attention a DeepSeek-V3 without experts; with recurrent
    layers a Qwen3-Next or a Nemotron-H, both with experts. ``marks`` are special tokens in addition to the end token.
    """
    settings: dict[str, Any] = {
        "vocab_size": END + 1 + len(marks),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": longest,
        "bos_token_id": None,
        "eos_token_id": END,
    }
    torch.manual_seed(seed)
    if recurrent:
        model = _recurrent_model(settings, recurrent)
    else:
        model = _latent_model(settings) if has_latent_attention else _grouped_model(settings, experts)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4 * (32 / hidden) ** 0.5)
    model.save_pretrained(folder)
    byte_backend(marks).save(str(folder / "tokenizer.json"))
    template = {} if chat_template is None else {"chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_TEXT, **template}))
    return folder


def _grouped_model(settings: dict[str, Any], experts: int) -> Any:
    if experts:
        return MixtralForCausalLM(MixtralConfig(**settings, num_local_experts=experts))
    return LlamaForCausalLM(LlamaConfig(**settings))


def _latent_model(settings: dict[str, Any]) -> Any:
    hidden = settings["hidden_size"]
    config = DeepseekV3Config(
        **settings | {"num_key_value_heads": settings["num_attention_heads"]},
        kv_lora_rank=hidden // 2,
        q_lora_rank=hidden // 2,
        qk_nope_head_dim=hidden // 4,
        qk_rope_head_dim=hidden // 4,
        v_head_dim=hidden // 4,
        first_k_dense_replace=settings["num_hidden_layers"],
    )
    return DeepseekV3ForCausalLM(config)


def _recurrent_model(settings: dict[str, Any], kind: Literal["delta", "mamba"]) -> Any:
    """States are a little smaller than a block of four tokens."""
    settings |= {"head_dim": settings["hidden_size"] // settings["num_attention_heads"], "moe_intermediate_size": 24}
    count = settings["num_hidden_layers"]
    if kind == "mamba":
        mixers = ["mamba", "moe", "attention", "mamba"]
        del settings["num_hidden_layers"]
        mamba = NemotronHConfig(
            **settings,
            layers_block_type=list(islice(cycle(mixers), count)),
            mamba_num_heads=4,
            mamba_head_dim=4,
            ssm_state_size=4,
            n_groups=2,
            conv_kernel=2,
            n_routed_experts=4,
            moe_shared_expert_intermediate_size=24,
        )
        return NemotronHForCausalLM(mamba)
    delta = Qwen3NextConfig(
        **settings,
        layer_types=list(islice(cycle(["linear_attention", "full_attention"]), count)),
        partial_rotary_factor=0.5,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
        linear_conv_kernel_dim=2,
        num_experts=4,
        num_experts_per_tok=2,
        shared_expert_intermediate_size=24,
    )
    return Qwen3NextForCausalLM(delta)
