"""Log probabilities of prompts: a pass computes those of a limited number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_support.random_llama import random_llama
from runtime_support.resident_memory import peak_growth

from megatron_runtime.config import InferenceConfig
from megatron_runtime.engine import context_limits
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.inference_request import DynamicInferenceRequest
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams

MakeEngine = Callable[..., DynamicInferenceEngine]
MIB = 2**20
SCORES = SamplingParams(
    temperature=0.0,
    num_tokens_to_generate=3,
    ignore_eos=True,
    return_log_probs=True,
    skip_prompt_log_probs=False,
    top_n_logprobs=2,
)
PLAIN = SamplingParams(temperature=0.0, num_tokens_to_generate=12, ignore_eos=True)


def likely_tokens(request: DynamicInferenceRequest) -> list[set[str]]:
    """At each place of the prompt."""
    return [set(each) for each in request.prompt_top_n_logprobs or ()]


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_log_probs_do_not_depend_on_the_number_in_a_pass(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, mode: str, chunked: bool
) -> None:
    settings = {"logprobs_mode": mode, "enable_chunked_prefill": chunked}
    prompts, params = [list(range(1, 41)), list(range(50, 80)), [9] * 4], [SCORES, SCORES, PLAIN]
    expected = [record.merge() for record in make_engine(**settings).generate(prompts, params)]
    monkeypatch.setattr(context_limits, "PROMPT_LOGIT_BYTES", 5 * 4 * 257)
    engine = make_engine(**settings)
    assert engine.context.limits.prompt_logits == 5
    rows: list[int] = []
    run = engine.controller.run

    def noting(*arguments: Any) -> Any:
        rows.append(len(arguments[0].logit_rows) - len(arguments[0].context_lengths))
        return run(*arguments)

    monkeypatch.setattr(engine.controller, "run", noting)
    for record, whole in zip(engine.generate(prompts, params), expected, strict=True):
        merged = record.merge()
        assert merged.generated_tokens == whole.generated_tokens
        assert merged.prompt_log_probs == pytest.approx(whole.prompt_log_probs, abs=1e-5)
        assert merged.generated_log_probs == pytest.approx(whole.generated_log_probs, abs=1e-5)
        assert likely_tokens(merged) == likely_tokens(whole)
    assert max(rows) == 5


def test_a_long_prompt_needs_no_memory_for_the_logits_of_all_its_tokens(byte_tokenizer: Tokenizer) -> None:
    vocabulary = 200_000
    model = random_llama(hidden=16, intermediate=16, std=0.4, vocab_size=vocabulary)
    config = InferenceConfig(kv_cache_memory_bytes=MIB, max_requests=1)
    engine = DynamicInferenceEngine.build(model, byte_tokenizer, config)
    engine.generate([[1, 2, 3]], SCORES)
    (record,), growth = peak_growth(lambda: engine.generate([list(range(1, 201))], SCORES))
    assert torch.tensor(record.merge().prompt_log_probs).isfinite().all()
    assert growth < 200 * vocabulary * torch.float32.itemsize
