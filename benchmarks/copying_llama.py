"""A small draft model that continues copies, without training."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import normalize

HIDDEN = 256
HALF, QUARTER = HIDDEN // 2, HIDDEN // 4
INTERMEDIATE = 32
"""Of feed-forward blocks, which add nothing."""
FARTHEST = 1024
"""Most tokens from a token to its copy."""
ROPE_THETA = 1e8
"""So large that half of the channels hardly depend on such distances."""
PREVIOUS, MATCH, COPIED = 12.0, 4.0, 3.0
"""Strength of attention to the tokens before, and to equal tokens, and of what it copies."""
CONFIDENCE = 2.0
"""Of predictions: the factor of all logits. The served model is as sure of copies."""


def write_copying_llama(folder: Path, embedding: Tensor, max_positions: int) -> None:
    """Write a Llama of two layers and two heads that predicts the token that followed the last two ones earlier.

    Its weights are induction heads (Olsson et al. 2022) of random channels: the first layer adds the two tokens before
    each token; in the second one, the last two tokens attend to the place behind equal ones, and its token is copied.

    Args:
        folder: For config.json and model.safetensors.
        embedding: [vocab, channels] of the served model; tokens are different where they are in it.
        max_positions: Of the served model.
    """
    fields = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(embedding),
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = {
        "model.embed_tokens.weight": tokens_as_channels(embedding),
        "model.norm.weight": torch.full((HIDDEN,), CONFIDENCE),
    }
    for number, attention in enumerate(induction_heads(torch.Generator().manual_seed(0))):
        layer = f"model.layers.{number}"
        tensors |= {
            f"{layer}.{norm}.weight": torch.ones(HIDDEN) for norm in ("input_layernorm", "post_attention_layernorm")
        }
        for name in ("gate_proj", "up_proj"):
            tensors[f"{layer}.mlp.{name}.weight"] = torch.zeros(INTERMEDIATE, HIDDEN)
        tensors[f"{layer}.mlp.down_proj.weight"] = torch.zeros(HIDDEN, INTERMEDIATE)
        for name in "qkvo":
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = attention.get(name, torch.zeros(HIDDEN, HIDDEN))
            tensors[f"{layer}.self_attn.{name}_proj.bias"] = attention.get(f"{name} bias", torch.zeros(HIDDEN))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def tokens_as_channels(embedding: Tensor) -> Tensor:
    """[vocab, HIDDEN]: the largest components in the first half of the channels, of equal strength, so that different
    tokens differ much."""
    table = embedding.detach().float()
    table = normalize(table - table.mean(0), dim=1)
    strength, directions = torch.linalg.eigh(table.T @ table)  # ascending
    components = normalize(table @ directions[:, -HALF:] / strength[-HALF:].sqrt(), dim=1)
    return torch.cat([components, torch.zeros(len(table), HIDDEN - HALF)], dim=1)


def induction_heads(noise: torch.Generator) -> list[dict[str, Tensor]]:
    """The weights and biases of the attention of both layers; others are 0."""
    unit = torch.eye(HIDDEN)
    token, before, second_before = torch.zeros(QUARTER, HIDDEN), unit[HALF : HALF + QUARTER], unit[HALF + QUARTER :]
    token[:, :HALF] = orthogonal(HALF, noise)[:QUARTER]
    # Constant queries and keys: rotated by positions, their product is largest one token before, or two.
    angles = ROPE_THETA ** (-torch.arange(QUARTER) / QUARTER)
    queries = [torch.cat([(number * angles).cos(), -(number * angles).sin()]) for number in (1, 2)]
    keys = torch.cat([torch.ones(QUARTER), torch.zeros(QUARTER)]).repeat(2)
    nothing = torch.zeros(QUARTER, HIDDEN)
    first = {
        "q bias": PREVIOUS * torch.cat(queries),
        "k bias": PREVIOUS * keys,
        "v": torch.cat([token, nothing, token, nothing]),
        "o": torch.cat([before, nothing, second_before, nothing]).T / HIDDEN**0.5,
    }
    # Queries are the current token and the one before; keys are the two before, in channels that are rotated little.
    stays = (angles * FARTHEST < 1).repeat(4)[:, None]
    one, other = (MATCH * stays * orthogonal(HIDDEN, noise)[:, :QUARTER] for _ in range(2))
    second = {
        "q": one @ token + other @ before,
        "k": one @ before + other @ second_before,
        "v": torch.cat([unit[:HALF], unit[:HALF]]),
        "o": COPIED * torch.cat([unit[:HALF], unit[:HALF]]).T / HIDDEN**0.5,
    }
    return [first, second]


def orthogonal(size: int, noise: torch.Generator) -> Tensor:
    """A random orthogonal matrix."""
    return torch.linalg.qr(torch.randn(size, size, generator=noise)).Q
