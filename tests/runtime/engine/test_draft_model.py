"""Drafts of a draft model change no token, in any batch, and are accepted as far as the model predicts the tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from engine_support.random_llama import random_llama
from engine_support.speculation import ENDLESS, WITH_GRAMMARS, Interrupt, Served, greedy, serve, with_penalties
from torch.utils.hooks import RemovableHandle

from megatron_runtime.config import InferenceConfig, KVCacheManagementMode
from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.scheduling.draft_length import DraftLength
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.model.decoder import Decoder
from megatron_runtime.model.kv_cache import KVCache
from megatron_runtime.sampling_params import SamplingParams

BLOCK = 4
PROMPTS = [list(range(20, 60)), [*range(20, 60), 3, 4], [5], [7, 8] * 9, list(range(60, 80))]
MakeEngine = Callable[..., DynamicInferenceEngine]


PARAMS = {
    "greedy": [greedy()] * 5,
    "sampled": [greedy(temperature=0.8, seed=seed, top_k=20, top_p=0.9) for seed in range(5)],
    "mixed": [
        greedy(),
        greedy(temperature=0.7, seed=3, min_tokens=20, ignore_eos=False),
        greedy(streaming=True, temperature=0.5, seed=4),
        greedy(stop_token_ids=[12, 60, 61, 62], min_tokens=5, streaming=True),
        greedy(bad_words=["a", "ab", "cd"], logit_bias={9: 2.0}),
    ],
    "with requests without drafts": [
        greedy(),
        greedy(return_log_probs=True, skip_prompt_log_probs=False),
        greedy(thinking_token_budget=3, thinking_begin="", thinking_end="AB"),
        greedy(temperature=0.5, seed=8),
        greedy(num_tokens_to_generate=0, pooling="mean"),
    ],
    "with penalties": with_penalties(temperature=0.6, seed=2),
    "with grammars": WITH_GRAMMARS,
}


@pytest.fixture(scope="session")
def other_model() -> Decoder:
    """A smaller model with other random weights and the same vocabulary."""
    return random_llama(hidden=16, intermediate=32, std=0.4, num_layers=1)


def assert_same_answers(
    engine: DynamicInferenceEngine,
    plain: DynamicInferenceEngine,
    requests: list[SamplingParams],
    interrupt: Interrupt = lambda *_: None,
) -> None:
    """With the same tokens. The last bits of log probabilities depend on the rows of a pass, since this model's
    products are not packed."""
    (answers, scores), (expected, expected_scores) = (
        serve(each, requests, PROMPTS, interrupt) for each in (engine, plain)
    )
    assert answers == expected
    assert scores == pytest.approx(expected_scores, abs=1e-4)


def accepted_fraction(engine: DynamicInferenceEngine) -> float:
    stats = engine.stats()
    return stats.accepted_draft_tokens_total / stats.draft_tokens_total


@pytest.fixture
def speculative(make_engine: MakeEngine, tiny_model: Decoder) -> MakeEngine:
    """``speculative(draft, blocks=200, **settings)``: an engine with a draft model and this number of blocks."""

    def make(draft: Decoder, blocks: int = 200, **settings: Any) -> DynamicInferenceEngine:
        size = settings.get("block_size_tokens", BLOCK)
        block = sum(KVCache.block_bytes(model.config, size, torch.float32) for model in (tiny_model, draft))
        given = {"num_speculative_tokens": 4, "enable_prefix_caching": True, "kv_cache_memory_bytes": blocks * block}
        engine = make_engine(**given | settings, speculative_draft_model=draft)
        assert engine.context.allocator.num_blocks == blocks
        assert sum(cache.num_bytes for cache in engine.context.caches) == blocks * block
        return engine

    return make


@pytest.mark.parametrize("requests", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("blocks", [200, 32], ids=["roomy", "with evictions"])
@pytest.mark.parametrize("draft", ["the model itself", "another model"])
def test_a_draft_model_changes_no_token(
    make_engine: MakeEngine,
    speculative: MakeEngine,
    tiny_model: Decoder,
    other_model: Decoder,
    requests: list[SamplingParams],
    blocks: int,
    draft: str,
) -> None:
    model = tiny_model if draft == "the model itself" else other_model
    plain = make_engine(blocks=blocks, enable_prefix_caching=True)
    engine = speculative(model, blocks)
    assert_same_answers(engine, plain, requests)
    stats = engine.stats()
    assert stats.draft_tokens_total > 0
    assert stats.generated_tokens_total == plain.stats().generated_tokens_total
    assert (stats.evictions_total > 0) == (blocks == 32)
    if model is tiny_model:
        assert accepted_fraction(engine) > 0.95
    else:
        assert accepted_fraction(engine) < 0.95


def test_a_grammar_that_fails_behind_a_draft_does_not_fail_before_it(
    make_engine: MakeEngine, speculative: MakeEngine, tiny_model: Decoder
) -> None:
    """The first pass of a prompt of one token has drafts. The grammar allows one token, and has no end."""
    for engine in (make_engine(), speculative(tiny_model)):
        (record,) = engine.generate([[5]], ENDLESS)
        assert (record.merge().generated_tokens, record.merge().finish_reason) == ([97], "error")


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_a_draft_that_is_always_right_saves_passes(
    make_engine: MakeEngine, speculative: MakeEngine, tiny_model: Decoder, sampling: dict[str, Any]
) -> None:
    steps = []
    for engine in (make_engine(block_size_tokens=16), speculative(tiny_model, block_size_tokens=16, blocks=20)):
        engine.add_request(0, PROMPTS[0], greedy(num_tokens_to_generate=100, **sampling))
        count = 0
        while engine.has_unfinished_requests():
            engine.step_modern()
            count += 1
        steps.append(count)
    assert steps[0] >= 100
    assert steps[1] < steps[0] / 3


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_drafts_stay_right_through_a_suspension(
    make_engine: MakeEngine, speculative: MakeEngine, tiny_model: Decoder, mode: str
) -> None:
    """The cache of the draft model is kept, moved or computed again with that of the model."""

    def suspend(engine: DynamicInferenceEngine, step: int) -> None:
        if step == 5:
            engine.suspend()
            stays = engine.config.kv_cache_management_mode is KVCacheManagementMode.PERSIST
            assert {cache.is_resident for cache in engine.context.caches} == {stays}
            engine.resume()

    plain = make_engine(blocks=200)
    engine = speculative(tiny_model, kv_cache_management_mode=mode, offload_weights=True)
    assert_same_answers(engine, plain, PARAMS["sampled"], suspend)
    assert accepted_fraction(engine) > 0.95


def test_a_prefix_hit_has_the_keys_of_the_draft_model(
    make_engine: MakeEngine, speculative: MakeEngine, tiny_model: Decoder
) -> None:
    """Those of tokens that requests without drafts have computed, and of accepted drafts."""
    plain, engine = make_engine(blocks=200), speculative(tiny_model)
    answers = []
    for each in (plain, engine):
        scored = greedy(return_log_probs=True, skip_prompt_log_probs=True)
        (first,) = each.generate([PROMPTS[0]], scored)
        longer = PROMPTS[0] + first.merge().generated_tokens
        (second,) = each.generate([longer], greedy())
        longest = longer + second.merge().generated_tokens
        (third,) = each.generate([longest], greedy(temperature=0.5, seed=1))
        answers.append([record.merge().generated_tokens for record in (first, second, third)])
    assert answers[0] == answers[1]
    assert engine.stats().cached_tokens_total == len(PROMPTS[0]) + len(longer)
    assert accepted_fraction(engine) > 0.95


def test_missing_keys_of_the_draft_model_are_computed_in_parts(
    speculative: MakeEngine, tiny_model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first 40 tokens of an answer have no drafts, and a pass has room for 8 tokens."""
    engine = speculative(tiny_model, blocks=40, block_size_tokens=16, max_tokens=8, max_requests=4)
    widest = calls = 0
    within = DraftLength.within

    def rest(self: DraftLength, limit: int) -> int:
        nonlocal calls
        calls += 1
        return within(self, limit) if calls > 40 else 0

    def measure(_module: object, inputs: tuple[Any, ...]) -> None:
        nonlocal widest
        widest = max(widest, len(inputs[0].tokens))

    monkeypatch.setattr(DraftLength, "within", rest)
    with tiny_model.register_forward_pre_hook(measure):
        engine.generate([PROMPTS[0]], greedy(num_tokens_to_generate=120))
    assert engine.stats().draft_tokens_total > 40
    assert accepted_fraction(engine) > 0.95
    assert widest == 8


def test_the_draft_model_rests_while_its_drafts_are_wrong(speculative: MakeEngine, other_model: Decoder) -> None:
    engine = speculative(other_model, block_size_tokens=16)
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    with other_model.register_forward_pre_hook(count):
        engine.generate([PROMPTS[0]], greedy(num_tokens_to_generate=120))
    assert 0 < engine.stats().draft_tokens_total < 40
    assert 0 < passes < 40


@dataclass
class Clock:
    """Advances when a model computes."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds

    def counts(self, model: Decoder, seconds: float) -> RemovableHandle:
        """Each pass of the model takes so many seconds."""

        def advance(*_: object) -> None:
            self.seconds += seconds

        return model.register_forward_pre_hook(advance)


def timed_run(engine: DynamicInferenceEngine, draft: Decoder, draft_seconds: float) -> tuple[Served, float]:
    """What two requests get, and the seconds until then, with passes of one second."""
    clock = engine.context.clock
    assert isinstance(clock, Clock)
    with clock.counts(engine.controller.model, 1.0), clock.counts(draft, draft_seconds):
        started = clock.seconds
        served = serve(engine, [greedy(num_tokens_to_generate=200), greedy(temperature=0.7, seed=2)], PROMPTS)
        return served, clock.seconds - started


@pytest.mark.parametrize(("draft_seconds", "least", "most"), [(0.02, 0.2, 0.5), (1.5, 1.0, 1.05)])
def test_a_draft_model_is_used_if_it_saves_time(
    make_engine: MakeEngine,
    speculative: MakeEngine,
    tiny_model: Decoder,
    draft_seconds: float,
    least: float,
    most: float,
) -> None:
    """Its drafts are right; it is switched off where a draft takes more time than a pass of the served model."""
    draft = copy.deepcopy(tiny_model)
    settings = {"block_size_tokens": 64, "enable_prefix_caching": False}
    plain, expected = timed_run(make_engine(blocks=400, clock=Clock(), **settings), draft, 0.0)
    engine = speculative(draft, 20, clock=Clock(), **settings)
    timed_run(engine, draft, draft_seconds)
    served, seconds = timed_run(engine, draft, draft_seconds)
    assert served == plain
    assert least < seconds / expected < most


def test_a_draft_model_that_is_not_used_computes_no_prompts(speculative: MakeEngine, tiny_model: Decoder) -> None:
    draft = copy.deepcopy(tiny_model)
    engine = speculative(draft, 40, clock=Clock(), block_size_tokens=64, enable_prefix_caching=False)
    timed_run(engine, draft, 20.0)
    widths: list[int] = []

    def measure(_module: object, inputs: tuple[Any, ...]) -> None:
        widths.append(len(inputs[0].tokens))

    with draft.register_forward_pre_hook(measure):
        engine.generate([PROMPTS[0]], greedy(num_tokens_to_generate=20))
    assert widths == []


def test_other_weights_and_aborted_requests_change_the_drafts_only(
    make_engine: MakeEngine, speculative: MakeEngine, other_model: Decoder
) -> None:
    """The draft model keeps its weights, and its keys and values, when those of the served model change."""
    answers = []
    for engine in (make_engine(blocks=200), speculative(other_model)):

        def interrupt(each: DynamicInferenceEngine, step: int) -> None:
            if step == 2:
                each.add_request(99, PROMPTS[0], greedy())
            elif step == 4:
                each.abort_request(99)
                each.invalidate_prefix_cache()

        answers.append(
            serve(engine, PARAMS["greedy"], PROMPTS, interrupt).answers
            + serve(engine, PARAMS["sampled"], PROMPTS).answers
        )
    assert answers[0] == answers[1]


def test_requests_without_a_draft_in_a_pass_are_not_drafted(speculative: MakeEngine, tiny_model: Decoder) -> None:
    engine = speculative(tiny_model)
    serve(
        engine,
        [greedy(return_log_probs=True), greedy(thinking_token_budget=3, thinking_begin="", thinking_end="A")],
        PROMPTS,
    )
    assert engine.stats().draft_tokens_total == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 300}, r"vocabulary has 300 tokens, but that of the served model 257; use a draft model"),
        ({"max_position_embeddings": 100}, r"takes 100 tokens, but a sequence may have 512; lower max_sequence_length"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(
    make_engine: MakeEngine, changes: dict[str, int], words: str
) -> None:
    draft = random_llama(hidden=16, intermediate=32, std=0.4, **changes)
    with pytest.raises(ConfigurationError, match=f"speculative_draft_model: .*{words}") as caught:
        make_engine(num_speculative_tokens=4, speculative_draft_model=draft)
    assert caught.value.field == "speculative_draft_model"


def test_settings_of_a_draft_model_are_checked(make_engine: MakeEngine, tiny_model: Decoder) -> None:
    with pytest.raises(ConfigurationError, match="speculative_draft_model has no effect with num_speculative_tokens=0"):
        InferenceConfig(speculative_draft_model=tiny_model)
    with pytest.raises(ConfigurationError, match="speculative_draft_model is a str; give the result of load_model"):
        make_engine(num_speculative_tokens=4, speculative_draft_model="/models/draft")
