"""Sampling parameters: validation, errors by name, and serialization."""

from __future__ import annotations

import math

import msgpack
import pytest

from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("min_p", 2),
        ("top_n_sigma", -1),
        ("top_n_sigma", math.nan),
        ("top_n_sigma", math.inf),
        ("top_n_sigma", 10**400),
        ("top_n_sigma", "1"),
        ("top_n_sigma", True),
        ("temperature", 10**400),
        ("repetition_penalty", 0),
        ("repetition_penalty", 101),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("presence_penalty", 3),
        ("presence_penalty", None),
        ("min_tokens", -1),
        ("n", 0),
        ("min_tokens", None),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_n_logprobs", -1),
        ("streaming_interval", 0),
        ("num_tokens_to_generate", -1),
        ("num_tokens_total", 0),
        ("termination_id", -2),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", True),
        ("streaming", 1),
        ("ignore_eos", "no"),
        ("return_segments", True),
        ("do_kv_handoff", True),
        ("do_kv_handoff", 0),
        ("stop", [""]),
        ("stop", [3]),
        ("stop", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 7),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}=") as refusal:
        SamplingParams(**{field: value})
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        ([1], "must map"),
        (7, "must map"),
        ({-1: 1.0}, "-1 is not a token id"),
        ({"x": 1.0}, "'x' is not a token id"),
        ({True: 1.0}, "True is not a token id"),
        ({3: 101}, "101 for token 3"),
        ({3: math.nan}, "nan for token 3"),
        ({3: "1"}, "'1' for token 3"),
        ({3: True}, "True for token 3"),
        ({1: 0.5, 2: math.nan, 3: 0.5}, "nan for token 2"),
        ({1: 0.5, -2: 0.5}, "-2 is not a token id"),
        ({"1": 0.5, "": 0.5}, "'' is not a token id"),
        ({"1": 0.5, "-2": 0.5}, "'-2' is not a token id"),
        ({"1": 0.5, "٢": 0.5}, "'٢' is not a token id"),
        ({"1": 0.5, "1" * 19: 0.5}, f"'{'1' * 19}' is not a token id"),
        ({1: 0.5, 2.0: 0.5}, "2.0 is not a token id"),
    ],
)
def test_an_invalid_bias_is_refused(bias: object, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^logit_bias.*{words}") as refusal:
        SamplingParams(logit_bias=bias)  # type: ignore[arg-type]
    assert refusal.value.field == "logit_bias"


def test_biases_may_name_their_tokens_in_text_as_json_does() -> None:
    assert SamplingParams(logit_bias={"3": 1, "40": -2.5}).logit_bias == {3: 1.0, 40: -2.5}  # type: ignore[dict-item]
    assert SamplingParams(logit_bias={"3": 1, 4: -2.5}).logit_bias == {3: 1.0, 4: -2.5}  # type: ignore[dict-item]
    assert SamplingParams(logit_bias={}).logit_bias is None


def test_combinations_of_parameters_are_checked() -> None:
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        SamplingParams(num_tokens_to_generate=1, num_tokens_total=2)
    with pytest.raises(InvalidRequestError, match="min_tokens=3 is more than num_tokens_to_generate=2"):
        SamplingParams(num_tokens_to_generate=2, min_tokens=3)
    with pytest.raises(InvalidRequestError, match="needs return_log_probs"):
        SamplingParams(top_n_logprobs=2)


def test_top_k_and_top_p_may_be_given_together() -> None:
    params = SamplingParams(top_k=50, top_p=0.9)
    assert (params.top_k, params.top_p) == (50, 0.9)


def test_stop_and_stop_words_are_the_same_parameter() -> None:
    for params in (SamplingParams(stop=["a"]), SamplingParams(stop_words=["a"]), SamplingParams(stop="a")):  # type: ignore[arg-type]
        assert params.stop == params.stop_words == ["a"]
    assert SamplingParams(stop=[]).stop is None
    with pytest.raises(InvalidRequestError, match="differ"):
        SamplingParams(stop=["a"], stop_words=["b"])


def test_attributes_are_set_together_or_not_at_all() -> None:
    params = SamplingParams(stop=["a"])
    params.add_attributes({"top_k": 3, "stop": ["b"]})
    assert (params.top_k, params.stop_words) == (3, ["b"])
    with pytest.raises(InvalidRequestError, match="top_p=7"):
        params.add_attributes({"top_k": 9, "top_p": 7})
    assert params.top_k == 3
    with pytest.raises(InvalidRequestError, match="top_q is not a sampling parameter"):
        params.add_attributes({"top_q": 1})
    params.add_attributes({"stop_words": None})
    assert params.stop is None


def test_parameters_survive_a_journey_as_msgpack() -> None:
    params = SamplingParams(
        temperature=0.5,
        seed=2**64 - 1,
        stop=["x", "é"],
        stop_token_ids=[1, 2],
        return_log_probs=True,
        top_n_logprobs=4,
        logit_bias={7: 1.5},
        min_tokens=2,
        presence_penalty=1,
    )
    assert SamplingParams.deserialize(msgpack.unpackb(msgpack.packb(params.serialize()))) == params
    assert SamplingParams.deserialize(msgpack.unpackb(msgpack.packb(params.serialize_changed()))) == params


def test_requests_have_only_the_parameters_that_are_not_at_their_defaults() -> None:
    """Engines of an earlier image accept requests that do not use a new parameter, while pods are upgraded in turn."""
    computed = {"return_prompt_top_n_logprobs": False}
    assert SamplingParams().serialize_changed() == computed
    params = SamplingParams(temperature=0, allowed_token_ids=[7])
    assert params.serialize_changed() == {"temperature": 0, "allowed_token_ids": [7], **computed}


def test_greedy_is_temperature_zero_or_one_candidate() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(top_k=1).is_greedy
    assert not SamplingParams().is_greedy


def test_prompt_top_n_follows_from_the_other_fields() -> None:
    asked = {"return_log_probs": True, "top_n_logprobs": 2}
    assert SamplingParams(**asked).return_prompt_top_n_logprobs
    assert not SamplingParams(**asked, skip_prompt_log_probs=True).return_prompt_top_n_logprobs


def test_return_prompt_top_n_logprobs_must_agree_with_the_other_parameters() -> None:
    params = SamplingParams(return_log_probs=True, top_n_logprobs=2, return_prompt_top_n_logprobs=True)
    assert SamplingParams.deserialize(params.serialize()) == params
    params.add_attributes({"skip_prompt_log_probs": True})
    assert params.return_prompt_top_n_logprobs is False
    with pytest.raises(InvalidRequestError, match="return_prompt_top_n_logprobs=True contradicts top_n_logprobs=0"):
        SamplingParams(return_prompt_top_n_logprobs=True)
