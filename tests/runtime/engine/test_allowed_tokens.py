"""``allowed_token_ids``, ``skip_special_tokens`` and the keys of the most likely tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.inference_request import DynamicInferenceRequest
from megatron_runtime.sampling_params import SamplingParams, token_of_key

MakeEngine = Callable[..., DynamicInferenceEngine]
PROMPT = [72, 101, 108, 108, 111]
END = 256


def serve(engine: DynamicInferenceEngine, **fields: object) -> DynamicInferenceRequest:
    params = SamplingParams(seed=3, num_tokens_to_generate=24, **fields)  # type: ignore[arg-type]
    return engine.generate([PROMPT], params)[0].merge()


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_an_answer_has_only_allowed_tokens(make_engine: MakeEngine, temperature: float) -> None:
    allowed = [97, 98, 99]
    request = serve(make_engine(), temperature=temperature, allowed_token_ids=allowed)
    assert set(request.generated_tokens) <= set(allowed)
    assert (len(request.generated_tokens), request.finish_reason) == (24, "length")
    single = serve(make_engine(), temperature=temperature, allowed_token_ids=[97, END], logit_bias={END: 100})
    assert (single.generated_tokens[-1], single.finish_reason) == (END, "stop")


def test_allowed_tokens_that_are_no_tokens_are_rejected(make_engine: MakeEngine) -> None:
    assert "allowed_token_ids: 5000 is not a token id" in str(serve(make_engine(), allowed_token_ids=[5000]).error)
    for wrong in ([], [-1], "97", [True]):
        with pytest.raises(InvalidRequestError, match="allowed_token_ids") as caught:
            SamplingParams(allowed_token_ids=wrong)  # type: ignore[arg-type]
        assert caught.value.field == "allowed_token_ids"
    with pytest.raises(InvalidRequestError, match="not possible together with a grammar"):
        SamplingParams(allowed_token_ids=[1], grammar='start: "no"')


def test_special_tokens_are_part_of_the_text_on_request(make_engine: MakeEngine) -> None:
    forced = {"allowed_token_ids": [END], "ignore_eos": True}
    assert serve(make_engine(), **forced).generated_text == ""
    assert serve(make_engine(), **forced, skip_special_tokens=False).generated_text == "<end>" * 24
    stopped = serve(make_engine(), **forced, skip_special_tokens=False, stop=["<end><end>"])
    assert (stopped.generated_text, stopped.stop_reason) == ("", "<end><end>")


def test_keys_of_the_most_likely_tokens_are_their_ids_on_request(make_engine: MakeEngine) -> None:
    fields = {"temperature": 0, "return_log_probs": True, "top_n_logprobs": 3}
    request = serve(make_engine(), **fields, return_tokens_as_token_ids=True)
    tops, prompt_tops = request.generated_top_n_logprobs, request.prompt_top_n_logprobs
    assert tops is not None
    assert prompt_tops is not None
    assert [token_of_key(next(iter(top))) for top in tops] == request.generated_tokens
    assert [len(top) for top in tops] == [3] * 24
    assert all(0 <= token_of_key(key) <= END for top in prompt_tops for key in top)
