"""Multimodal checkpoints, written by transformers: the text model is served, the other parts are ignored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from runtime_support.family_models import MINISTRAL_3_ROPE, QWEN_3_5
from runtime_support.reference_models import CLOSE, EXPERTS, NO_SPECIAL_TOKENS, SIZES, logits_of
from safetensors.torch import load_file, save_file

from megatron_runtime.model.checkpoint import load_model

VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def gemma_3(text: dict[str, Any]) -> Any:
    config = transformers.Gemma3Config(
        text_config=text | {"sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=60,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def mistral_3(text: dict[str, Any], **changes: Any) -> Any:
    vision = VISION | {"head_dim": 8, "model_type": "pixtral"}
    config = transformers.Mistral3Config(text_config=text, vision_config=vision, image_token_index=60, **changes)
    return transformers.Mistral3ForConditionalGeneration(config)


def llama_4(text: dict[str, Any]) -> Any:
    vision = VISION | dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 16)
    config = transformers.Llama4Config(
        text_config=text | {"num_local_experts": 2, "intermediate_size_mlp": 24, "attention_chunk_size": 7},
        vision_config=vision | {"intermediate_size": 64},
    )
    return transformers.Llama4ForConditionalGeneration(config)


def qwen_3_5(text: dict[str, Any], family: str = "Qwen3_5", **changes: Any) -> Any:
    """With sections of rotary channels for the three positions of tokens in images."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    rope = {"mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.5, "rope_theta": 1e4}
    text = text | {name: value for name, value in QWEN_3_5.items() if name != "partial_rotary_factor"} | changes
    config = getattr(transformers, f"{family}Config")(
        text_config=text | {"rope_parameters": rope | {"rope_type": "default"}},
        vision_config=vision | {"patch_size": 4, "num_position_embeddings": 16},
        tie_word_embeddings=changes.get("tie_word_embeddings", False),
    )
    return getattr(transformers, f"{family}ForConditionalGeneration")(config)


MULTIMODAL: dict[str, Callable[[dict[str, Any]], Any]] = {
    "gemma 3": gemma_3,
    "mistral small 3.1": lambda text: mistral_3(text | {"model_type": "mistral"}, tie_word_embeddings=False),
    "ministral 3, with a tied head": lambda text: mistral_3(
        text | {"model_type": "ministral3", "rope_parameters": MINISTRAL_3_ROPE}
    ),
    "llama 4": llama_4,
    "qwen3.5": qwen_3_5,
    "qwen3.5 with a tied head": lambda text: qwen_3_5(text, tie_word_embeddings=True),
    "qwen3.5 with experts": lambda text: qwen_3_5(text, "Qwen3_5Moe", **EXPERTS, shared_expert_intermediate_size=24),
}


def randomize(model: Any, std: float = 0.1) -> None:
    """Recurrent layers get smaller weights: with larger ones, rounding changes some logits by more than CLOSE."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=std)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_only_the_text_model_of_a_multimodal_model_is_read(name: str, tmp_path: Path, paged_requests: Any) -> None:
    model = MULTIMODAL[name](SIZES | NO_SPECIAL_TOKENS).eval()
    randomize(model, std=0.1 if name.startswith("qwen3.5") else 0.2)
    model.save_pretrained(tmp_path)
    tokens = list(range(1, 40))
    ours = paged_requests(load_model(tmp_path, dtype="float32")).forward({"it": tokens})["it"]
    torch.testing.assert_close(ours, logits_of(model, tokens), **CLOSE)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5 with a tied head", "qwen3.5 with experts"])
def test_a_text_model_that_was_a_part_of_a_multimodal_one_is_read(
    name: str, tmp_path: Path, paged_requests: Any
) -> None:
    """Transformers writes it with the names that it had there; published files also have layers for further tokens."""
    MULTIMODAL[name](SIZES | NO_SPECIAL_TOKENS).save_pretrained(tmp_path / "whole")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    randomize(model)
    model.save_pretrained(tmp_path / "text")
    path = tmp_path / "text" / "model.safetensors"
    tensors = load_file(path)
    assert "model.language_model.embed_tokens.weight" in tensors
    save_file(tensors | {"mtp.layers.0.mlp.up_proj.weight": torch.zeros(48, 32)}, path)
    tokens = list(range(1, 40))
    decoder = load_model(tmp_path / "text", dtype="float32")
    assert "model.embed_tokens.weight" in decoder.destinations()
    ours = paged_requests(decoder).forward({"it": tokens})["it"]
    torch.testing.assert_close(ours, logits_of(model, tokens), **CLOSE)
