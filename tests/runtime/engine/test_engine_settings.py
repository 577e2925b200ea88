"""What settings do that only show in a running engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.loop_requests import LoopRequests
from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire.bodies import RequestBody
from megatron_runtime.wire.codec import unpack_body
from megatron_runtime.wire.items import Assignment

MakeEngine = Callable[..., DynamicInferenceEngine]
PROMPT = [72, 101, 108, 108, 111]


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(temperature=0, **{"num_tokens_to_generate": 4, **fields})


def test_an_engine_with_the_last_logits_alone_scores_answers_and_no_prompts(make_engine: MakeEngine) -> None:
    engine = make_engine(materialize_only_last_token_logits=True)
    refused = engine.generate([PROMPT], greedy(return_log_probs=True))[0].merge()
    assert isinstance(refused.error, InvalidRequestError)
    assert refused.error.field == "skip_prompt_log_probs"
    scored = engine.generate([PROMPT], greedy(return_log_probs=True, skip_prompt_log_probs=True))[0].merge()
    assert len(scored.generated_log_probs or []) == 4


def test_static_pointers_stay_through_a_suspension(make_engine: MakeEngine) -> None:
    engine = make_engine(static_kv_memory_pointers=True)
    before = engine.context.kv_cache.layer(0)[0].data_ptr()
    engine.suspend()
    engine.resume()
    assert engine.context.kv_cache.layer(0)[0].data_ptr() == before


def test_a_text_gets_its_start_token_when_asked_for(
    make_engine: MakeEngine, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_tokenizer, "bos", 255)
    engine = make_engine()

    def prompt_of(prompt: str | list[int], **fields: object) -> list[int]:
        tokens = engine.generate([prompt], greedy(**fields))[0].merge().prompt_tokens
        assert tokens is not None
        return tokens.tolist()

    assert prompt_of("Hello") == PROMPT
    assert prompt_of("Hello", add_BOS=True) == [255, *PROMPT]
    assert prompt_of(PROMPT, add_BOS=True) == PROMPT


@pytest.mark.parametrize("wanted", [False, True])
def test_a_reply_has_the_prompt_s_tokens_when_asked_for(make_engine: MakeEngine, wanted: bool) -> None:
    engine = make_engine()
    requests = LoopRequests(engine)
    params = greedy(return_prompt_tokens=wanted)
    requests.take(Assignment(b"u" * 16, 0, False), RequestBody("Hello", params.serialize()))
    while engine.has_unfinished_requests():
        for record in engine.step_modern()["finished_request_records"]:
            served = requests.finish(record)
    assert served is not None
    assert served.reply is not None
    prompt_tokens = unpack_body(served.reply)["prompt_tokens"]
    assert (prompt_tokens is not None) == wanted
    if wanted:
        assert prompt_tokens[1] == PROMPT
