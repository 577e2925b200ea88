"""The results of a request are bitwise independent of the other requests and of the way they are computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_support.random_llama import random_llama

from megatron_runtime.config import InferenceConfig, KVCacheManagementMode
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.inference_request import DynamicInferenceRequestRecord
from megatron_runtime.model.config import (
    ClampedGate,
    ExpertsConfig,
    LatentAttentionConfig,
    QueryTemperature,
    RoutingConfig,
)
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.recurrent_config import GatedDeltaConfig, Mamba2Config
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

NEW, PROMPTS = 20, [[(31 * row + 7 * column) % 256 for column in range(1 + 9 * row)] for row in range(10)]
SHARED = [[*range(70), row, row + 1] for row in range(4)]


LATENT = LatentAttentionConfig(kv_lora_rank=96, q_lora_rank=80, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24)
CHUNKS_AND_SINKS: dict[str, Any] = {
    "layer_windows": (24, None),
    "chunked_windows": True,
    "attention_sinks": True,
    "unrotated_layers": frozenset({1}),
    "rope_interleave": True,
    "query_temperature": QueryTemperature(0.5, 16, offset=1),
    "query_key_norm": "unweighted",
    "norm": "layer_without_bias",
    "mlp_bias": True,
    "clamped_gate": ClampedGate(1.7, 0.5),
    "experts": ExpertsConfig(4, 2, 96, RoutingConfig("sigmoid", weights_inputs=True, has_bias=True)),
}
"""Features of Llama 4, Command R and gpt-oss in one model."""


DELTA: dict[str, Any] = {
    "recurrent": GatedDeltaConfig(frozenset({0}), key_heads=2, value_heads=4, key_dim=24, value_dim=40, taps=4),
    "attention_output_gate": True,
}
"""Features of Qwen3-Next."""


MAMBA: dict[str, Any] = {
    "num_layers": 4,
    "recurrent": Mamba2Config(
        frozenset({0}), key_heads=2, value_heads=4, key_dim=24, value_dim=40, taps=4, has_bias=True
    ),
    "feed_forward_layers": frozenset({1, 3}),
    "unrotated_layers": frozenset(range(4)),
    "norm": "rms_in_float32",
    "activation": "relu_squared",
    "gated_feed_forward": False,
    "experts": ExpertsConfig(
        *(4, 2, 96, RoutingConfig("sigmoid", has_selection_bias=True)),
        dense_layers=frozenset({0, 1, 2}),
        shared_intermediate_size=64,
    ),
}
"""Features of Nemotron-H."""


@pytest.fixture(
    scope="module",
    params=[
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.float32, {"latent_attention": LATENT}),
        (torch.bfloat16, {"latent_attention": LATENT}),
        (torch.bfloat16, CHUNKS_AND_SINKS),
        (torch.float32, DELTA),
        (torch.bfloat16, DELTA),
        (torch.float32, MAMBA),
        (torch.bfloat16, MAMBA),
    ],
    ids=[
        *("torch.float32", "torch.bfloat16", "latents-torch.float32", "latents-torch.bfloat16", "chunks-and-sinks"),
        *("states-torch.float32", "states-torch.bfloat16", "mamba-torch.float32", "mamba-torch.bfloat16"),
    ],
)
def model(request: pytest.FixtureRequest) -> Decoder:
    """Large enough for the matrix kernels' paths for few and for many rows."""
    dtype, changes = request.param
    model = random_llama(hidden=128, intermediate=2048, std=0.1, dtype=dtype, **changes)
    model.prepare()
    return model


Numbers = list[tuple[list[int], list[float]]]


def make_engine(model: Decoder, tokenizer: Tokenizer, *, blocks: int = 400, **settings: Any) -> DynamicInferenceEngine:
    """An engine with small blocks, without a prefix cache unless ``settings`` enable one."""
    memory, recurrent = blocks * KVCache.block_bytes(model.config, 8, model.dtype), model.config.recurrent
    if recurrent is not None:
        settings = {"max_requests": 10} | settings
        memory += settings["max_requests"] * recurrent.state_bytes
    config = InferenceConfig(
        block_size_tokens=8, kv_cache_memory_bytes=memory, **{"enable_prefix_caching": False, **settings}
    )
    return DynamicInferenceEngine.build(model, tokenizer, config)


def params_of(prompt: list[int]) -> SamplingParams:
    return SamplingParams(
        temperature=0.9,
        seed=sum(prompt),
        num_tokens_to_generate=NEW,
        ignore_eos=True,
        return_log_probs=True,
        skip_prompt_log_probs=True,
    )


def numbers_of(record: DynamicInferenceRequestRecord) -> tuple[list[int], list[float]]:
    request = record.merge()
    assert request.generated_log_probs is not None
    return list(request.generated_tokens), list(request.generated_log_probs)


def serve(
    model: Decoder, tokenizer: Tokenizer, prompts: list[list[int]], *, together: bool = True, **settings: Any
) -> tuple[Numbers, DynamicInferenceEngine]:
    """Sampled tokens and log probabilities of each prompt's answer; and the engine."""
    engine = make_engine(model, tokenizer, **settings)
    numbers: Numbers = []
    for group in [prompts] if together else [[prompt] for prompt in prompts]:
        numbers += map(numbers_of, engine.generate(group, [params_of(prompt) for prompt in group]))
    return numbers, engine


@pytest.fixture(scope="module")
def alone(model: Decoder, byte_tokenizer: Tokenizer) -> Numbers:
    return serve(model, byte_tokenizer, PROMPTS, together=False)[0]


def test_beside_others(model: Decoder, byte_tokenizer: Tokenizer, alone: Numbers) -> None:
    assert serve(model, byte_tokenizer, PROMPTS)[0] == alone


@pytest.mark.parametrize("max_tokens", [10, 11, 64])
def test_tokens_are_the_same_with_chunked_prefill(
    max_tokens: int, model: Decoder, byte_tokenizer: Tokenizer, alone: Numbers
) -> None:
    pieces = {"max_tokens": max_tokens, "max_requests": 10, "enable_chunked_prefill": True}
    assert serve(model, byte_tokenizer, PROMPTS, **pieces)[0] == alone


def test_when_evicted_and_computed_again(model: Decoder, byte_tokenizer: Tokenizer, alone: Numbers) -> None:
    numbers, engine = serve(model, byte_tokenizer, PROMPTS, blocks=20)
    assert engine.stats().evictions_total > 0
    assert numbers == alone


def test_over_a_prefix_that_another_request_left(model: Decoder, byte_tokenizer: Tokenizer) -> None:
    without, _ = serve(model, byte_tokenizer, SHARED)
    cached, engine = serve(model, byte_tokenizer, SHARED, together=False, enable_prefix_caching=True)
    assert engine.stats().prefix_hits_total == len(SHARED) - 1
    assert cached == without


@pytest.mark.parametrize("mode", list(KVCacheManagementMode))
def test_through_a_suspension(
    mode: KVCacheManagementMode, model: Decoder, byte_tokenizer: Tokenizer, alone: Numbers
) -> None:
    engine = make_engine(model, byte_tokenizer, kv_cache_management_mode=mode)
    futures = [engine.add_request(row, PROMPTS[row], params_of(PROMPTS[row])) for row in range(4)]
    for _ in range(5):
        engine.step_modern()
    engine.suspend()
    engine.resume()
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert [numbers_of(future.result(timeout=0)) for future in futures] == alone[:4]
