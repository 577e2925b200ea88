"""Answers match their grammar, in any batch and when they continue on another engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.sampling import compiled_grammars as grammars_module
from megatron_runtime.errors import InvalidRequestError
from megatron_runtime.guides import choice_grammar, json_schema_grammar, lark_grammar, regex_grammar
from megatron_runtime.inference_request import DynamicInferenceRequest
from megatron_runtime.sampling_params import SamplingParams

PROMPT = [72, 101, 108, 108, 111]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
MakeEngine = Callable[..., DynamicInferenceEngine]


def serve(engine: DynamicInferenceEngine, params: SamplingParams) -> DynamicInferenceRequest:
    return engine.generate([PROMPT], params)[0].merge()


def guided(grammar: str, **fields: Any) -> SamplingParams:
    return SamplingParams(grammar=grammar, num_tokens_to_generate=120, **{"temperature": 1.0, "seed": 5, **fields})


@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"top_k": 40, "top_p": 0.8}, {"min_p": 0.1}])
def test_a_random_model_answers_in_the_form_of_a_schema(make_engine: MakeEngine, fields: dict[str, Any]) -> None:
    request = serve(make_engine(), guided(json_schema_grammar(SCHEMA), **fields))
    assert set(json.loads(request.generated_text or "")) == {"name", "age"}
    assert request.finish_reason == "stop"


@pytest.mark.parametrize("logprobs_mode", ["raw_logprobs", "processed_logprobs"])
def test_guided_and_free_requests_share_passes(make_engine: MakeEngine, logprobs_mode: str) -> None:
    free = SamplingParams(temperature=0, num_tokens_to_generate=30, ignore_eos=True)
    ours = guided(regex_grammar("[ab]{20}"), return_log_probs=True, skip_prompt_log_probs=True)
    alone = serve(make_engine(), free)
    engine = make_engine(logprobs_mode=logprobs_mode)
    engine.add_request(0, PROMPT, ours)
    engine.add_request(1, PROMPT, free)
    found = {}
    while engine.has_unfinished_requests():
        for record in engine.step_modern()["finished_request_records"]:
            found[record.request_id] = record.merge()
    assert re.fullmatch("[ab]{20}", found[0].generated_text)
    assert len(found[0].generated_log_probs) == len(found[0].generated_tokens)
    assert found[1].generated_tokens == alone.generated_tokens


def test_requests_with_the_same_grammar_compile_it_once(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    new_matcher = grammars_module._new_matcher

    def counted(vocabulary: Any, grammar: str) -> Any:
        compiled.append(grammar)
        return new_matcher(vocabulary, grammar)

    monkeypatch.setattr(grammars_module, "_new_matcher", counted)
    engine = make_engine()
    monkeypatch.setattr(engine.tokenizer, "_kept", {})
    grammars = [regex_grammar("[ab]{9}"), regex_grammar("[cd]{9}"), regex_grammar("[ab]{9}")]
    for request_id, grammar in enumerate(grammars):
        engine.add_request(request_id, PROMPT, guided(grammar, seed=request_id))
    found = {}
    while engine.has_unfinished_requests():
        for record in engine.step_modern()["finished_request_records"]:
            found[record.request_id] = record.merge().generated_text
    assert re.fullmatch("[ab]{9},[cd]{9},[ab]{9}", ",".join(found[request_id] for request_id in range(3)))
    assert compiled == grammars[:2]


@pytest.mark.parametrize("made", [1, 7, 15])
def test_a_guided_request_continues_equally_on_another_engine(make_engine: MakeEngine, made: int) -> None:
    params = guided(json_schema_grammar(SCHEMA))
    tokens = serve(make_engine(), params).generated_tokens
    engine = make_engine()
    future = engine.add_request(0, PROMPT, params, generated=tokens[:made])
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert future.result().merge().generated_tokens == tokens


def test_a_guided_request_survives_its_eviction(make_engine: MakeEngine) -> None:
    params = guided(lark_grammar('start: "[" item ("," item){9} "]"\nitem: /[0-9]{3}/'))
    whole = serve(make_engine(), params)
    engine = make_engine()
    future = engine.add_request(0, PROMPT, params)
    for _ in range(12):
        engine.step_modern()
    engine.suspend()
    engine.resume()
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert future.result().merge().generated_tokens == whole.generated_tokens


def test_a_request_with_a_broken_grammar_is_refused(make_engine: MakeEngine) -> None:
    request = serve(make_engine(), SamplingParams(grammar="start: missing"))
    assert isinstance(request.error, InvalidRequestError)
    assert "unknown name" in str(request.error)


@pytest.mark.parametrize(
    ("make", "value", "words"),
    [
        (json_schema_grammar, "{", "can't be read"),
        (json_schema_grammar, "[1]", "must be a JSON object"),
        (json_schema_grammar, {"type": "nonsense"}, "nonsense"),
        (regex_grammar, "a(b", "unclosed group"),
        (choice_grammar, [], "at least one"),
        (lark_grammar, "start: missing", "unknown name"),
    ],
)
def test_a_grammar_without_possible_answers_is_refused(make: Callable[[Any], str], value: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(words)):
        make(value)


@pytest.mark.parametrize("field", [{"min_tokens": 3}, {"ignore_eos": True}])
def test_settings_that_continue_after_the_end_of_a_grammar_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(field))):
        SamplingParams(grammar='start: "a"', **field)


def test_thousands_of_choices_are_followed(make_engine: MakeEngine) -> None:
    choices = [f"choice number {number}" for number in range(4096)]
    assert serve(make_engine(), guided(choice_grammar(choices))).generated_text in choices


def test_grammars_that_would_keep_the_engine_busy_are_refused() -> None:
    def wide(properties: int) -> dict[str, Any]:
        return {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(properties)}}

    json_schema_grammar(wide(1000))
    with pytest.raises(InvalidRequestError, match="an object with 1001 properties; use at most 1000"):
        json_schema_grammar({"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, wide(1001)]}}})
    with pytest.raises(InvalidRequestError, match="too big"):
        json_schema_grammar({"type": "object", "properties": {f"o{number}": wide(1000) for number in range(8)}})
