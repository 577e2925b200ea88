"""The preflight's estimate of the memory of passes on a CPU, beside what passes take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_support.random_llama import random_llama
from runtime_support.resident_memory import peak_growth
from runtime_support.small_facts import PLENTY, SMALL_FACTS

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.launch.options import EngineOptions, LaunchOptions, ModelSource
from megatron_runtime.launch.preflight import ACTIVATION_COPIES, RANK_OVERHEAD, plan_engine
from megatron_runtime.model.activations import MOST_RECORDED_ROWS, RECORDED_ROWS, activation_elements
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

MIB = 2**20


def estimate(model: Decoder, max_requests: int) -> int:
    """The bytes of the passes in the reserve of the preflight."""
    elements, vocabulary = activation_elements(model.shard), model.config.vocab_size
    facts = replace(SMALL_FACTS, activation_elements=elements, vocabulary=vocabulary)
    options = LaunchOptions(model=ModelSource(path=Path("/m")), engine=EngineOptions(max_requests=max_requests))
    return plan_engine(options, facts, PLENTY).reserve_bytes - RANK_OVERHEAD


def packed_engine(model: Decoder, tokenizer: Tokenizer, max_requests: int) -> DynamicInferenceEngine:
    model.prepare()
    config = InferenceConfig(kv_cache_memory_bytes=8 * MIB, max_requests=max_requests, max_sequence_length=64)
    return DynamicInferenceEngine.build(model, tokenizer, config)


@pytest.mark.parametrize("is_scored", [False, True])
def test_the_estimate_covers_the_logits_of_many_requests(byte_tokenizer: Tokenizer, is_scored: bool) -> None:
    model = random_llama(hidden=16, intermediate=16, std=0.4, vocab_size=100_000)
    engine = packed_engine(model, byte_tokenizer, 64)
    params = SamplingParams(
        top_p=0.95,
        num_tokens_to_generate=4,
        ignore_eos=True,
        return_log_probs=is_scored,
        skip_prompt_log_probs=not is_scored,
        top_n_logprobs=5 if is_scored else 0,
    )
    engine.generate([[1, 2, 3]], params)
    records, growth = peak_growth(lambda: engine.generate([[number, 2, 3] for number in range(64)], params))
    assert all(len(record.merge().generated_tokens) == 4 for record in records)
    assert 64 * 4 * 100_000 < growth < estimate(model, 64)


def test_the_estimate_covers_all_recordings(byte_tokenizer: Tokenizer) -> None:
    model = random_llama(hidden=128, intermediate=384, std=0.4)
    engine = packed_engine(model, byte_tokenizer, MOST_RECORDED_ROWS)
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=4, ignore_eos=True)
    rows = 1
    while rows <= MOST_RECORDED_ROWS:
        engine.generate([[number % 250] for number in range(rows)], params)
        rows *= 2
    assert model.recorded_layers is not None
    assert model.recorded_layers.num_bytes > 0 or not model.is_packed, "unpacked matrices are multiplied by PyTorch"
    estimated = ACTIVATION_COPIES * RECORDED_ROWS * activation_elements(model.shard) * 4
    assert model.recorded_layers.num_bytes < estimated
