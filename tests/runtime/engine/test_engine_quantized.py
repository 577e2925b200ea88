"""SmolLM2's matrices stay quantized in the engine, and no schedule changes a token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.inference_request import DynamicInferenceRequestRecord
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.quantized.linear import QuantizedLinear
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

pytestmark = pytest.mark.model

PARAMS = [
    SamplingParams(
        temperature=0.8 * (index % 2), seed=index, num_tokens_to_generate=24, ignore_eos=True, return_log_probs=True
    )
    for index in range(8)
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Decoder:
    return load_model(smollm2_path, dtype="bfloat16", quantized_weights="keep")


def engine_of(model: Decoder, tokenizer: Tokenizer, blocks: int, **settings: object) -> DynamicInferenceEngine:
    memory = blocks * KVCache.block_bytes(model.config, 16, torch.bfloat16)
    return DynamicInferenceEngine.build(model, tokenizer, InferenceConfig(kv_cache_memory_bytes=memory, **settings))


def answers(records: list[DynamicInferenceRequestRecord]) -> list[tuple[list[int], object]]:
    """Tokens and log probabilities."""
    requests = [record.merge() for record in records]
    return [(request.generated_tokens, request.generated_log_probs) for request in requests]


@pytest.fixture(scope="module")
def alone(smollm2: Decoder, tokenizer: Tokenizer, prompts: list[str]) -> list[tuple[list[int], object]]:
    """The answers to eight prompts, each in an engine without other requests."""
    pairs = zip(prompts, PARAMS, strict=False)
    return [answers(engine_of(smollm2, tokenizer, 200).generate([prompt], params))[0] for prompt, params in pairs]


@pytest.mark.parametrize(
    ("blocks", "settings"),
    [(200, {}), (200, {"max_tokens": 13}), (14, {"max_tokens": 24})],
    ids=["roomy", "chunked", "crowded and chunked"],
)
def test_bits_do_not_depend_on_the_schedule(
    smollm2: Decoder,
    tokenizer: Tokenizer,
    prompts: list[str],
    alone: list[tuple[list[int], object]],
    blocks: int,
    settings: dict[str, int],
) -> None:
    assert isinstance(smollm2.layers[0].feed_forward.down, QuantizedLinear)
    engine = engine_of(smollm2, tokenizer, blocks, **settings)
    assert answers(engine.generate(prompts[: len(PARAMS)], PARAMS)) == alone
    assert (engine.stats().evictions_total > 0) == (blocks < 200)


def test_a_suspension_with_released_weights_changes_no_bit(
    smollm2_path: Path, tokenizer: Tokenizer, prompts: list[str], alone: list[tuple[list[int], object]]
) -> None:
    model = load_model(smollm2_path, dtype="bfloat16", quantized_weights="keep")
    engine = engine_of(model, tokenizer, 200, offload_weights=True)
    pairs = enumerate(zip(prompts, PARAMS, strict=False))
    futures = [engine.add_request(index, prompt, params) for index, (prompt, params) in pairs]
    for _ in range(10):
        engine.step_modern()
    engine.suspend()
    assert model.device.type == "meta"
    engine.resume()
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert isinstance(model.layers[0].feed_forward.down, QuantizedLinear)
    assert answers([future.result(timeout=0) for future in futures]) == alone
