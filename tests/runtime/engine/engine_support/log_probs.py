"""Expected shape and values of a request's log probabilities."""

from __future__ import annotations

import pytest

from megatron_runtime.inference_request import DynamicInferenceRequest
from megatron_runtime.sampling_params import SamplingParams


def assert_log_probs(
    request: DynamicInferenceRequest, params: SamplingParams, prompt_length: int, expected: list[float]
) -> None:
    """``expected`` are those of every token of prompt and answer but the first; only requested values may be present.

    The answer must have its full length; each position has the number of most likely tokens that ``params`` requests.
    """
    before, top_n, skip = prompt_length - 1, params.top_n_logprobs, params.skip_prompt_log_probs
    assert request.generated_log_probs == pytest.approx(expected[before:], abs=1e-3)
    tops, made = request.generated_top_n_logprobs, params.num_tokens_to_generate
    assert tops is None if top_n == 0 else [len(top) for top in tops or []] == [top_n] * made
    assert request.prompt_log_probs == (None if skip else pytest.approx(expected[:before], abs=1e-3))
    prompt_tops = request.prompt_top_n_logprobs
    assert prompt_tops is None if skip or top_n == 0 else [len(top) for top in prompt_tops or []] == [top_n] * before
