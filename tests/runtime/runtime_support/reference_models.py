"""Reference models of transformers: how they are created, their results, and the tolerances."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

CLOSE = {"atol": 1e-4, "rtol": 0.0}
"""Tolerance of logits in float32, compared with transformers."""
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""The usual ones are beyond such a small vocabulary."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 2.0, 4.0, 7.0],
    "original_max_position_embeddings": 16,
}
CLASSES = {
    "Gemma3Config": "Gemma3TextConfig",
    "Llama4Config": "Llama4TextConfig",
    "Qwen3_5Config": "Qwen3_5TextConfig",
    "Qwen3_5MoeConfig": "Qwen3_5MoeTextConfig",
    "GPT2ForCausalLM": "GPT2LMHeadModel",
}
"""Class names that do not follow from the family's name."""


def new_model(family: str, *, kind: str = "ForCausalLM", **settings: Any) -> Any:
    """A model of ``family`` (as in class names of transformers) as initialized by transformers from seed 0."""
    torch.manual_seed(0)
    config_class, model_class = (CLASSES.get(family + end, family + end) for end in ("Config", kind))
    config = getattr(transformers, config_class)(**(NO_SPECIAL_TOKENS | settings))
    return getattr(transformers, model_class)(config).eval()


def selection_biases(model: Any) -> list[torch.Tensor]:
    """The biases of routers: buffers, which initialization leaves at zero."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


@torch.inference_mode()
def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab]."""
    return model(torch.tensor([tokens])).logits[0]


def precise_logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """As `logits_of`, in float64. In float32, gated delta layers of transformers are off by 2e-4 on some CPUs."""
    precise = copy.deepcopy(model).double()
    if precise._can_set_experts_implementation():
        precise.set_experts_implementation("eager")  # the default has no float64
    return logits_of(precise, tokens).float()


def assert_most_likely(model: Any, prompt: list[int], made: list[int]) -> None:
    """Checks that every token is the one that transformers finds most likely after the prompt and the previous ones.

    Tokens whose logits differ only in the last digit of a float32 are considered equally likely.
    """
    logits = logits_of(model, prompt + made)[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(made)[:, None])[:, 0]
    torch.testing.assert_close(chosen, logits.amax(-1), atol=2e-7, rtol=2e-7)
