"""Drafts from the prompt change no token, in any batch, and save passes where the answer repeats its context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engine_support.speculation import WITH_GRAMMARS, greedy, guided, serve, with_penalties

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.engine.scheduling.prompt_lookup import PromptLookup
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.sampling_params import SamplingParams

REPETITIVE = [10, 11, 12, 13, 14, 15, 16, 17] * 4
PROMPTS = [REPETITIVE, [*REPETITIVE, 40, 41], [5], [7, 8] * 9, list(range(20, 60))]
MakeEngine = Callable[..., DynamicInferenceEngine]


PARAMS = {
    "greedy": [greedy()] * 5,
    "sampled": [greedy(temperature=0.3, seed=seed, top_k=3, top_p=0.9) for seed in range(5)],
    "mixed": [
        greedy(),
        greedy(temperature=0.4, seed=3, min_tokens=20, ignore_eos=False),
        greedy(streaming=True),
        greedy(stop_token_ids=[12, 60, 61, 62], min_tokens=5),
        greedy(bad_words=["a", "ab", "cd"], logit_bias={9: 2.0}),
    ],
    "with requests without drafts": [
        greedy(),
        greedy(return_log_probs=True, skip_prompt_log_probs=True),
        greedy(),
        greedy(temperature=0.5, seed=8),
        greedy(thinking_token_budget=3, thinking_begin="", thinking_end="AB"),
    ],
    "with penalties": with_penalties(),
    "with grammars": WITH_GRAMMARS,
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("blocks", [200, 26], ids=["roomy", "with evictions"])
@pytest.mark.parametrize("block_size_tokens", [4, 16])
def test_speculation_changes_no_token(
    make_engine: MakeEngine, params: list[SamplingParams], blocks: int, block_size_tokens: int
) -> None:
    settings = {"blocks": blocks, "block_size_tokens": block_size_tokens, "enable_prefix_caching": True}
    plain, speculative = (make_engine(num_speculative_tokens=drafts, **settings) for drafts in (0, 7))
    assert serve(speculative, params, PROMPTS).answers == serve(plain, params, PROMPTS).answers
    stats = speculative.stats()
    assert stats.accepted_draft_tokens_total > 0
    assert stats.draft_tokens_total >= stats.accepted_draft_tokens_total
    assert stats.generated_tokens_total == plain.stats().generated_tokens_total
    assert plain.stats().draft_tokens_total == 0
    assert (stats.evictions_total > 0) == (blocks == 26)


def test_drafts_that_are_right_save_passes(make_engine: MakeEngine) -> None:
    plain, speculative = (make_engine(num_speculative_tokens=drafts, block_size_tokens=16) for drafts in (0, 7))
    steps = []
    for engine in (plain, speculative):
        engine.add_request(0, [5], greedy(num_tokens_to_generate=100, logit_bias={10: 100.0}))
        count = 0
        while engine.has_unfinished_requests():
            engine.step_modern()
            count += 1
        steps.append(count)
    assert steps[0] >= 100
    assert steps[1] < steps[0] / 4


@pytest.mark.parametrize("interval", [1, 3])
def test_a_stream_has_all_tokens_of_a_step(make_engine: MakeEngine, interval: int) -> None:
    engine = make_engine(num_speculative_tokens=7, block_size_tokens=16)
    stream = {"streaming": True, "streaming_interval": interval}
    serve(engine, [greedy(num_tokens_to_generate=100, logit_bias={10: 100.0}, **stream)], PROMPTS)
    assert engine.stats().accepted_draft_tokens_total > 0


def test_drafts_that_a_grammar_does_not_allow_do_not_disturb_it(make_engine: MakeEngine) -> None:
    """The prompt repeats what the grammar forbids after the first letters, and what it allows with another end."""
    prompt = list(b"abcabcabcabXabXabXab")
    answers = []
    for drafts in (0, 7):
        engine = make_engine(num_speculative_tokens=drafts, block_size_tokens=16, blocks=200)
        params = [guided("(abd){10}"), guided("(ab(c|d)){12}", seed=7), guided("(abc){8}")]
        answers.append([record.merge().generated_tokens for record in engine.generate([prompt] * 3, params)])
    assert answers[0] == answers[1]
    stats = engine.stats()
    assert 0 < stats.accepted_draft_tokens_total < stats.draft_tokens_total


@pytest.mark.parametrize("value", [-1, 1.5, True, "two"])
def test_an_invalid_number_of_drafts_is_refused(make_engine: MakeEngine, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"num_speculative_tokens={value!r}.*whole number"):
        make_engine(num_speculative_tokens=value)


def test_drafts_continue_the_last_occurrence_of_the_latest_tokens() -> None:
    tokens = [1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 7, 1, 2, 3, 4]
    assert PromptLookup(8).propose(tokens, 3) == (6, 7, 1)
    assert PromptLookup(2).propose(tokens, 3) == (6, 7)
    assert PromptLookup(8).propose(tokens, 0) == ()
    assert PromptLookup(8).propose([9, 3, 4, 8, 1, 3, 4], 6) == (8, 1, 3, 4, 8, 1)
    assert PromptLookup(8).propose([1, 2, 3], 5) == ()
    assert PromptLookup(8).propose([7, 7, 7], 5) == (7, 7, 7, 7, 7)


def test_tokens_whose_bytes_overlap_others_are_not_matched() -> None:
    tokens = [0x00000001, 0x01000000, 0x00000100, 0x00010000, 5, 6, 0x00000001, 0x00010000]
    assert PromptLookup(8).propose(tokens, 8) == ()


def test_drafts_become_fewer_when_they_are_wrong_and_more_when_they_are_right() -> None:
    lookup = PromptLookup(8)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    assert len(lookup.propose(tokens, 8)) == 8
    lookup.note(8, 3)
    assert len(lookup.propose(tokens, 8)) == 4
    lookup.note(4, 4)
    assert len(lookup.propose(tokens, 8)) == 8
    lengths, passes = [], []
    for _ in range(11):
        lookup.note(8, 0)
        waited = 0
        while not (drafts := lookup.propose(tokens, 8)):
            waited += 1
        lengths.append(len(drafts))
        passes.append(waited)
    assert lengths == [4, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert passes == [0, 0, 0, 1, 2, 4, 8, 16, 32, 32, 32]
    lookup.note(1, 1)
    assert len(lookup.propose(tokens, 8)) == 2
