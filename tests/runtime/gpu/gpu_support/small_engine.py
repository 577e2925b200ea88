"""A small engine with random weights, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from runtime_support.byte_backend import END, byte_backend

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.model.config import LatentAttentionConfig, ModelConfig
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

LAYERS = 2
LATENTS: dict[str, Any] = {
    "head_dim": 24,
    "rotary_dim": 8,
    "latent_attention": LatentAttentionConfig(
        kv_lora_rank=32, q_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12
    ),
}
"""Changes of a model so that it has multi-head latent attention."""
LOWER_CASE = "start: /[a-z]+/"


def random_decoder(**changes: Any) -> Decoder:
    """Two layers of random weights that make the most likely token unambiguous."""
    sizes: dict[str, Any] = {
        "architecture": "llama",
        "vocab_size": END + 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": LAYERS,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
    }
    model = Decoder(ModelConfig(**(sizes | changes)), dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        weight.data.fill_(1.0) if weight.dim() == 1 else weight.data.normal_(std=0.4, generator=generator)
    return model


def one_layer(**changes: Any) -> Decoder:
    """A model that the interpreter runs faster."""
    return random_decoder(**({"num_layers": 1} | changes))


def on_gpu(model: Decoder) -> Decoder:
    """A copy on the current GPU, which may be a pretended one."""
    other = Decoder(model.config, dtype=model.dtype, device="cuda")
    other.copy_from(model)
    return other


def with_noise(model: Decoder) -> Decoder:
    """A copy whose tokens are those of the model at times."""
    other, generator = Decoder(model.config, dtype=model.dtype), torch.Generator().manual_seed(5)
    other.copy_from(model)
    for weight in other.parameters():
        weight.data += torch.empty_like(weight).normal_(std=0.05, generator=generator)
    return other


def small_engine(model: Decoder, **config: Any) -> DynamicInferenceEngine:
    """For at most 4 requests, and without graphs of prompts, which take long to capture, unless the configuration says
    otherwise."""
    tokenizer = Tokenizer(byte_backend(), location="bytes", eod=END)
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 20, "max_sequence_length": 256, "max_requests": 4}
    settings["use_cuda_graphs_for_non_decode_steps"] = False
    return DynamicInferenceEngine.build(model, tokenizer, InferenceConfig(**(settings | config)))


def generate(
    engine: DynamicInferenceEngine,
    params: dict[str, Any],
    between: Callable[[DynamicInferenceEngine], None] | None = None,
    lengths: Sequence[int] = (4, 4, 4, 4),
) -> list[list[int]]:
    """Tokens of requests with prompts of different lengths; ``between`` is called after the third pass."""
    futures = []
    for index, length in enumerate(lengths):
        prompt = [65 + (index * 3 + at * at) % 60 for at in range(3 + 7 * index)]
        given = {"temperature": 0.0, "seed": 7 + index, "num_tokens_to_generate": length, "ignore_eos": True} | params
        futures.append(engine.add_request(index, prompt, SamplingParams(**given)))
    while engine.has_unfinished_requests():
        engine.step_modern()
        if between is not None and engine.context.step_count == 3:
            between(engine)
    return [future.result(timeout=0).merge().generated_tokens for future in futures]


def suspend_and_resume(engine: DynamicInferenceEngine) -> None:
    """Once."""
    engine.suspend()
    engine.resume()
