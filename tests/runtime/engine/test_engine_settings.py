"""Settings with an effect only in a running engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.worker.loop_requests import AssignedBody, LoopRequests
from megatron_runtime.errors import ConfigurationError, InvalidRequestError
from megatron_runtime.inference_request import DynamicInferenceEventType
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.model.tokenizer import Tokenizer
from megatron_runtime.sampling_params import SamplingParams
from megatron_runtime.wire.bodies import RequestBody
from megatron_runtime.wire.codec import unpack_body
from megatron_runtime.wire.items import Assignment

MakeEngine = Callable[..., DynamicInferenceEngine]
PROMPT = [72, 101, 108, 108, 111]
LONG = {"num_tokens_to_generate": 24}


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(temperature=0, **{"num_tokens_to_generate": 4, **fields})


def test_an_engine_with_last_token_logits_only_scores_answers_and_no_prompts(make_engine: MakeEngine) -> None:
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


def test_only_a_persistent_kv_cache_keeps_its_address_on_a_cpu(make_engine: MakeEngine) -> None:
    expected = r"^static_kv_memory_pointers=True.*'offload'.*the device is cpu, and not a GPU; 'persist'"
    with pytest.raises(ConfigurationError, match=expected) as refusal:
        make_engine(static_kv_memory_pointers=True, kv_cache_management_mode="offload")
    assert refusal.value.field == "static_kv_memory_pointers"


def test_a_text_gets_a_bos_token_if_requested(
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


def test_a_text_with_tokens_beyond_the_embedding_fails_alone(
    make_engine: MakeEngine, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    expected = engine.generate([PROMPT], greedy())[0].merge().generated_tokens
    monkeypatch.setattr(byte_tokenizer, "bos", 100_000)
    other = engine.add_request(1, PROMPT, greedy())
    refused = engine.add_request(2, "Hello", greedy(add_BOS=True))
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert other.result(timeout=0).merge().generated_tokens == expected
    error = refused.result(timeout=0).merge().error
    assert "prompt[0]=100000 is not a token id; the model has 0 to" in str(error)


@pytest.mark.parametrize("wanted", [False, True])
def test_a_reply_has_the_prompt_tokens_if_requested(make_engine: MakeEngine, wanted: bool) -> None:
    engine = make_engine()
    requests = LoopRequests(engine, on_compiled=lambda: None)
    params = greedy(return_prompt_tokens=wanted)
    requests.add(Assignment(b"u" * 16, 0, False, 0), AssignedBody(RequestBody("Hello", params.serialize())))
    while engine.has_unfinished_requests():
        for record in engine.step_modern()["finished_request_records"]:
            served = requests.finish(record)
    assert served is not None
    assert served.reply is not None
    prompt_tokens = unpack_body(served.reply)["prompt_tokens"]
    assert (prompt_tokens is not None) == wanted
    if wanted:
        assert prompt_tokens[1] == PROMPT


@pytest.mark.parametrize("tracks", [False, True])
def test_paused_requests_keep_their_cache_while_they_wait_for_memory(
    make_engine: MakeEngine, tiny_model: Decoder, tracks: bool
) -> None:
    prompts = [[i + 1] * (3 + i) for i in range(8)]
    expected = [record.merge().generated_tokens for record in make_engine(200).generate(prompts, greedy(**LONG))]
    blocks = 16 * KVCache.block_bytes(tiny_model.config, 4, torch.float32) / 2**30
    evictions = {}
    for share in (None, blocks):
        engine = make_engine(16, paused_buffer_size_gb=share, track_paused_request_events=tracks)
        futures = [engine.add_request(i, prompt, greedy(**LONG)) for i, prompt in enumerate(prompts)]
        most_paused = 0
        while engine.has_unfinished_requests():
            engine.step_modern()
            engine.check_integrity()
            most_paused = max(most_paused, engine.stats().paused)
        merged = [future.result(timeout=0).merge() for future in futures]
        assert [request.generated_tokens for request in merged] == expected
        pauses = [e for request in merged for e in request.events if e.type is DynamicInferenceEventType.PAUSE]
        assert (most_paused > 0) == (share is not None)
        assert bool(pauses) == (tracks and share is not None)
        evictions[share] = engine.stats().evictions_total
    assert evictions[blocks] < evictions[None]


def test_token_events_report_the_use_of_blocks(make_engine: MakeEngine) -> None:
    engine = make_engine(32, track_generated_token_events=True, enable_prefix_caching=True)
    engine.generate([PROMPT], greedy())
    payloads = [
        event.payload
        for record in engine.generate([PROMPT, [*PROMPT, 1]], greedy(num_tokens_to_generate=1))
        for event in record.merge().events
        if event.type is DynamicInferenceEventType.GENERATED_TOKEN
    ]
    known = {"blocks_total": 32, "blocks_hashed_total": 1, "blocks_hashed_active": 1}
    # The prompts share their first block and have different second ones; the first request ends before the second.
    owners = [4, 2]
    assert [{name: payload[name] for name in known} for payload in payloads] == [known] * 2
    assert [payload["blocks_ref_count"] for payload in payloads] == owners
    plain = make_engine(32, track_generated_token_events=True).generate([PROMPT], greedy())[0].merge()
    assert all(event.payload.keys() <= {"token_id", "blocks_total"} for event in plain.events if event.payload)


class Written:
    """Records the figures of a metrics writer."""

    def __init__(self) -> None:
        self.figures: list[dict[str, Any]] = []

    def log(self, figures: dict[str, Any]) -> None:
        self.figures.append(figures)


def test_figures_are_logged_and_written_at_an_interval_of_steps(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "megatron_runtime.engine.step_log")
    writer = Written()
    engine = make_engine(20, max_requests=2, logging_step_interval=3, metrics_writer=writer)
    for request_id in range(3):
        engine.add_request(request_id, PROMPT, greedy(num_tokens_to_generate=5))
    for _ in range(7):
        engine.step_modern()
    assert [record.message.split(":")[0] for record in caplog.records] == ["step 3", "step 6"]
    assert "2 active, 0 paused, 1 waiting, 0 finished" in caplog.records[0].message
    assert [figures["inference/inference_step"] for figures in writer.figures] == [3, 6]
    first, second = writer.figures
    assert first["inference/step_time_s"] > 0
    expected = {
        "active_request_count": 2,
        "paused_request_count": 0,
        "total_request_count": 2,
        "waiting_queue_len": 1,
        "total_requests_dict_size": 3,
        "active_token_count": 2,
        "max_requests": 2,
        "total_blocks": 20,
        "allocated_blocks": 4,
        "active_unique_blocks": 4,
        "block_count_avail": 16,
        "allocated_utilization": 20.0,
        "active_utilization": 20.0,
    }
    assert {name: first[f"inference/{name}"] for name in expected} == expected
    assert second["inference/prefix_cache_hits"] == 0
    assert second["inference/prefix_cache_prompt_tokens_computed"] == 15
    assert second["inference/active_token_count"] == 5


def test_a_failing_writer_does_not_affect_the_engine(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Written()
    monkeypatch.setattr(writer, "log", lambda figures: figures["nothing"])
    engine = make_engine(logging_step_interval=1, metrics_writer=writer)
    assert engine.generate([PROMPT], greedy())[0].merge().succeeded()
    assert "the figures of step 4 could not be written" in caplog.text


def test_nothing_is_logged_by_default(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megatron_runtime.engine.step_log")
    make_engine().generate([PROMPT], greedy())
    assert caplog.records == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logging_step_interval": -1}, "logging_step_interval=-1 must be"),
        ({"logging_step_interval": True}, "logging_step_interval=True must be"),
        ({"logging_step_interval": 1, "metrics_writer": "wandb"}, "metrics_writer='wandb' has no method log"),
        ({"metrics_writer": Written()}, "metrics_writer has no effect with logging_step_interval=0"),
    ],
)
def test_an_unusable_metrics_writer_is_refused(make_engine: MakeEngine, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make_engine(**fields)
