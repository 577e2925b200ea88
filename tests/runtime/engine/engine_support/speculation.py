"""Requests that are served with and without drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.guides import lark_grammar, regex_grammar
from megatron_runtime.sampling_params import SamplingParams

Interrupt = Callable[[DynamicInferenceEngine, int], None]


def greedy(**fields: Any) -> SamplingParams:
    """Of 60 greedy tokens, unless the fields say otherwise."""
    return SamplingParams(**{"temperature": 0, "num_tokens_to_generate": 60, "ignore_eos": True, **fields})


def guided(pattern: str, **fields: Any) -> SamplingParams:
    """Of a text that matches the pattern."""
    return SamplingParams(
        **{"num_tokens_to_generate": 60, "temperature": 1.0, "seed": 4, "grammar": regex_grammar(pattern), **fields}
    )


ENDLESS = SamplingParams(temperature=0, num_tokens_to_generate=60, grammar=lark_grammar('start: "a" start'))
"""A grammar without an end."""
WITH_GRAMMARS = [
    greedy(),
    guided("[ab]{56}", temperature=0),
    guided("((abc|abd)e){14}"),
    guided("(xyz)*", temperature=0),
    ENDLESS,
]


def with_penalties(**counted: Any) -> list[SamplingParams]:
    """``counted`` are further fields of the request with penalties by count and presence."""
    return [
        greedy(repetition_penalty=1.05),
        greedy(frequency_penalty=0.05, presence_penalty=0.02, **counted),
        greedy(repetition_penalty=0.9, temperature=0.5, seed=3),
        greedy(frequency_penalty=-0.1),
        greedy(repetition_penalty=1.01, frequency_penalty=0.01, logit_bias={9: 1.0}),
    ]


class Served(NamedTuple):
    """What requests got, in their order."""

    answers: list[Any]
    """Tokens, text and finish reason of each."""
    scores: list[float]
    """All log probabilities."""


def serve(
    engine: DynamicInferenceEngine,
    requests: list[SamplingParams],
    prompts: list[list[int]],
    interrupt: Interrupt = lambda *_: None,
) -> Served:
    """Serves the requests together; checks the engine's integrity after each step, and that streams are whole."""
    for request_id, each in enumerate(requests):
        engine.add_request(request_id, prompts[request_id % len(prompts)], each)
    found: dict[int, Any] = {}
    scores: dict[int, list[float]] = {}
    streamed: dict[int, list[int]] = {}
    step = 0
    while engine.has_unfinished_requests():
        result = engine.step_modern()
        engine.check_integrity()
        for request_id, partial in result["partial_outputs"].items():
            streamed.setdefault(request_id, []).extend(partial.new_tokens)
        for record in result["finished_request_records"]:
            merged = record.merge()
            found[record.request_id] = merged.generated_tokens, merged.generated_text, merged.finish_reason
            scores[record.request_id] = [*(merged.prompt_log_probs or []), *(merged.generated_log_probs or [])]
        step += 1
        interrupt(engine, step)
    for request_id, tokens in streamed.items():
        assert tokens == found[request_id][0]
    ids = range(len(requests))
    return Served([found[each] for each in ids], [score for each in ids for score in scores[each]])
