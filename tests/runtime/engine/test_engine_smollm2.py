"""SmolLM2's greedy answers equal those of transformers token by token, in any schedule."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from runtime_support.reference_models import assert_most_likely
from suite_support.repetition import repeated

from megatron_runtime.config import InferenceConfig, KVCacheManagementMode
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.inference_request import DynamicInferenceRequestRecord
from megatron_runtime.model.checkpoint import load_model, load_tokenizer
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

pytestmark = pytest.mark.model

EVERY = repeated(2, 1)
"""Of the prompts: every second one, or all."""
COUNT = repeated(16, 32)
"""Tokens of an answer, whose last one is in the second or third block of its request."""
CROWDED = repeated(12, 24)
"""Blocks that are too few for all answers."""
GREEDY = SamplingParams(temperature=0, ignore_eos=True, num_tokens_to_generate=COUNT)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Decoder:
    return load_model(smollm2_path, dtype="float32")


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


def engine_of(model: Decoder, tokenizer: Tokenizer, *, blocks: int = 200, **settings: object) -> DynamicInferenceEngine:
    memory = blocks * KVCache.block_bytes(model.config, 16, torch.float32)
    return DynamicInferenceEngine.build(model, tokenizer, InferenceConfig(kv_cache_memory_bytes=memory, **settings))


@pytest.fixture(scope="module")
def prompts(prompts: list[str]) -> list[str]:
    return prompts[::EVERY]


def tokens_of(records: list[DynamicInferenceRequestRecord]) -> list[list[int]]:
    return [record.merge().generated_tokens for record in records]


@pytest.fixture(scope="module")
def expected(
    smollm2: Decoder, tokenizer: Tokenizer, prompts: list[str], reference_model: LlamaForCausalLM
) -> list[list[int]]:
    """An answer to each prompt, every token of which is the most likely one of transformers."""
    answers = tokens_of(engine_of(smollm2, tokenizer).generate(prompts, GREEDY))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == COUNT
        assert_most_likely(reference_model, tokenizer.tokenize(prompt), answer)
    return answers


@pytest.mark.repetition
@pytest.mark.parametrize("number", repeated(range(0, 20, 10), range(20)))
def test_a_single_prompt_has_the_tokens_of_transformers(
    smollm2: Decoder, tokenizer: Tokenizer, prompts: list[str], expected: list[list[int]], number: int
) -> None:
    index = number // EVERY
    assert tokens_of(engine_of(smollm2, tokenizer).generate([prompts[index]], GREEDY)) == [expected[index]]


@pytest.mark.repetition
@pytest.mark.parametrize(
    ("blocks", "settings", "evicts"),
    [(200, {}, False), (200, {"max_tokens": 24}, False), (CROWDED, {}, True), (CROWDED, {"max_tokens": 24}, True)],
    ids=["roomy", "chunked", "crowded", "crowded and chunked"],
)
def test_prompts_all_together_give_transformers_tokens(
    smollm2: Decoder,
    tokenizer: Tokenizer,
    prompts: list[str],
    expected: list[list[int]],
    blocks: int,
    settings: dict[str, int],
    evicts: bool,
) -> None:
    engine = engine_of(smollm2, tokenizer, blocks=blocks, **settings)
    assert tokens_of(engine.generate(prompts, GREEDY)) == expected
    assert (engine.stats().evictions_total > 0) == evicts
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0


@pytest.mark.repetition
@pytest.mark.parametrize("mode", list(KVCacheManagementMode))
def test_a_suspension_in_the_middle_changes_no_token(
    smollm2: Decoder,
    tokenizer: Tokenizer,
    prompts: list[str],
    expected: list[list[int]],
    mode: KVCacheManagementMode,
) -> None:
    engine = engine_of(smollm2, tokenizer, kv_cache_management_mode=mode)
    futures = [engine.add_request(i, prompt, GREEDY) for i, prompt in enumerate(prompts)]
    for _ in range(COUNT // 2):
        engine.step_modern()
    engine.suspend()
    engine.resume()
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert tokens_of([future.result(timeout=0) for future in futures]) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_conversations_with_a_common_prefix_get_the_same_tokens_from_a_shared_cache(
    smollm2: Decoder, tokenizer: Tokenizer, temperature: float
) -> None:
    system = {"role": "system", "content": "You are a patient teacher who answers in one short sentence."}
    questions = ["What is a prime number?", "What is a verb?", "Why is the sky blue?", "What is a prime?"]
    prompts = [tokenizer.apply_chat_template([system, {"role": "user", "content": each}]) for each in questions]
    params = [SamplingParams(seed=i, temperature=temperature, num_tokens_to_generate=12) for i in range(4)]
    expected = tokens_of(engine_of(smollm2, tokenizer).generate(prompts, params))
    engine = engine_of(smollm2, tokenizer, enable_prefix_caching=True)
    for _ in range(2):
        assert tokens_of(engine.generate(prompts, params)) == expected
    assert engine.stats().prefix_hits_total == 7
    engine.check_integrity()


def test_a_chat_answer_ends_with_the_end_token_and_contains_paris(smollm2: Decoder, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    request = engine_of(smollm2, tokenizer).generate([prompt], SamplingParams(temperature=0))[0].merge()
    assert request.finish_reason == "stop"
    assert request.generated_text is not None
    assert "Paris" in request.generated_text
    assert "<|im_end|>" not in request.generated_text
