"""Multimodal checkpoints, written by transformers: the text model is served, the other parts are ignored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from runtime_support.family_models import MINISTRAL_3_ROPE
from runtime_support.reference_models import CLOSE, NO_SPECIAL_TOKENS, SIZES, logits_of

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


MULTIMODAL: dict[str, Callable[[dict[str, Any]], Any]] = {
    "gemma 3": gemma_3,
    "mistral small 3.1": lambda text: mistral_3(text | {"model_type": "mistral"}, tie_word_embeddings=False),
    "ministral 3, with a tied head": lambda text: mistral_3(
        text | {"model_type": "ministral3", "rope_parameters": MINISTRAL_3_ROPE}
    ),
    "llama 4": llama_4,
}


@pytest.mark.parametrize("name", MULTIMODAL)
def test_only_the_text_model_of_a_multimodal_model_is_read(name: str, tmp_path: Path, paged_requests: Any) -> None:
    model = MULTIMODAL[name](SIZES | NO_SPECIAL_TOKENS).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    model.save_pretrained(tmp_path)
    tokens = list(range(1, 40))
    ours = paged_requests(load_model(tmp_path, dtype="float32")).forward({"it": tokens})["it"]
    torch.testing.assert_close(ours, logits_of(model, tokens), **CLOSE)
