"""Penalties, biases and forbidden tokens equal their definitions, truncation equals a full sort."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.engine.sampling.filters import EDITS, TRUNCATIONS
from megatron_runtime.engine.sampling.filters.protocol import Draws, FilterRequest
from megatron_runtime.engine.sampling.filters.token_edits import AllowedTokens, LogitBias
from megatron_runtime.engine.sampling.filters.token_filter import TokenFilter
from megatron_runtime.engine.sampling.filters.truncations import TopK
from megatron_runtime.engine.sampling.sampler import processed_log_probs
from megatron_runtime.engine.sampling.sampling_table import SamplingRules, SamplingTable
from megatron_runtime.engine.sampling.top_k import row_max, top_k
from megatron_runtime.engine.scheduling.sequence import Sequence
from megatron_runtime.sampling_params import SamplingParams

VOCABULARY = 20
PROMPT = [3, 3, 5]
ANSWER = [7, 5, 7, 9]


def running(row: int, tokens: list[int], prompt_length: int) -> Sequence:
    return Sequence(row, tokens, prompt_length, max_length=10**6, row=row)


def edited(params: SamplingParams, tokens: list[int], **more: Any) -> torch.Tensor:
    """One row of logits -5, -4, ... after the edits for the next token."""
    params.seed = 0
    table = SamplingTable(1, VOCABULARY)
    table.write(0, params, len(PROMPT), **more)
    logits = torch.arange(VOCABULARY, dtype=torch.float32)[None] - 5
    table.rules([(running(0, tokens, len(PROMPT)), len(tokens))]).edit_(logits)
    return logits[0]


def token_edits(params: SamplingParams, prompt_length: int, stop_ids: tuple[int, ...], vocabulary: int) -> Any:
    """``after(tokens, length)``: the values of a request's edits by token, for each filter."""
    request = FilterRequest(params, prompt_length, stop_ids)
    kinds = [kind(1, vocabulary) for kind in EDITS if issubclass(kind, TokenFilter)]
    edits = {kind.parameters[0]: kind.start(request) for kind in kinds}

    def after(tokens: list[int], length: int) -> dict[str, dict[int, float]]:
        found = {name: edit.after(tokens, length) for name, edit in edits.items() if edit is not None}
        return {name: dict(zip(*map(list, values), strict=True)) for name, values in found.items()}

    return after


def changes(params: SamplingParams, **more: Any) -> dict[int, float]:
    """The changed logits by token, after prompt and answer."""
    now = edited(params, PROMPT + ANSWER, **more)
    return {token: now[token].item() for token in range(VOCABULARY) if now[token] != token - 5}


def test_repetition_penalty_scales_logits_of_prompt_and_answer_by_their_sign() -> None:
    # Token 5 has a logit of 0, which no factor changes.
    assert changes(SamplingParams(repetition_penalty=2.0)) == {3: -4.0, 7: 1.0, 9: 2.0}


def test_frequency_penalty_counts_tokens_of_the_answer_only() -> None:
    assert changes(SamplingParams(frequency_penalty=0.5)) == {5: -0.5, 7: 1.0, 9: 3.5}


def test_presence_penalty_does_not_depend_on_the_count() -> None:
    assert changes(SamplingParams(presence_penalty=-1.5)) == {5: 1.5, 7: 3.5, 9: 5.5}


def test_logit_bias_precedes_the_penalties() -> None:
    assert changes(SamplingParams(logit_bias={7: 2.0, 0: -100.0})) == {0: -105.0, 7: 4.0}
    together = SamplingParams(logit_bias={7: 2.0}, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=1)
    assert changes(together)[7] == (2 + 2) / 2 - 0.25 * 2 - 1


def test_the_last_token_of_a_bad_word_is_excluded_once_the_answer_ends_with_the_others() -> None:
    words = (
        (4,),
        (*ANSWER[-2:], 6),
        (*ANSWER[-2:], 8),
        (0, 1),
        (PROMPT[-1], *ANSWER, 2),
        (VOCABULARY, 3),
        (VOCABULARY,),
    )
    excluded = changes(SamplingParams(), bad_sequences=words)
    assert excluded == dict.fromkeys((4, 6, 8), -np.inf)


def test_stop_tokens_are_forbidden_until_min_tokens() -> None:
    stops = (0, 7, 300, -1)
    forbidden = {0: -torch.inf, 7: -torch.inf}
    assert changes(SamplingParams(min_tokens=5), stop_ids=stops) == forbidden
    assert changes(SamplingParams(min_tokens=4), stop_ids=stops) == {}
    assert changes(SamplingParams(min_tokens=4, presence_penalty=1), stop_ids=stops)[7] == 1.0
    assert changes(SamplingParams(min_tokens=5, logit_bias={0: 9.0}), stop_ids=stops) == forbidden


@given(
    tokens=st.lists(st.integers(0, VOCABULARY - 1), min_size=len(PROMPT), max_size=200),
    params=st.builds(
        SamplingParams,
        repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
        frequency_penalty=st.sampled_from([0.0, -0.3, 0.7]),
        presence_penalty=st.sampled_from([0.0, 1.1]),
        min_tokens=st.integers(0, 9),
        logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100, width=32)),
    ),
    jumps=st.lists(st.integers(0, 200)),
)
def test_incremental_edits_equal_edits_computed_at_once(
    tokens: list[int], params: SamplingParams, jumps: list[int]
) -> None:
    grown = token_edits(params, len(PROMPT), (1, 2), VOCABULARY)
    for length in [
        *range(len(PROMPT), len(tokens) + 1),
        *(jump for jump in jumps if len(PROMPT) <= jump <= len(tokens)),
    ]:
        fresh = token_edits(params, len(PROMPT), (1, 2), VOCABULARY)
        assert grown(tokens, length) == fresh(tokens, length)


def test_edits_of_thousands_of_tokens_are_complete() -> None:
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, logit_bias=dict.fromkeys(range(100), 1.0))
    tokens = [*range(3000), *range(3000, 4000)]
    found = token_edits(params, 3000, (), 5000)(tokens, 4000)
    assert found["repetition_penalty"] == dict.fromkeys(tokens, 2.0)
    assert found["logit_bias"] == dict.fromkeys(range(100), 1.0)
    assert found["frequency_penalty"] == dict.fromkeys(range(3000, 4000), 1.0)


def test_edits_stay_in_their_rows() -> None:
    table = SamplingTable(3, VOCABULARY)
    for row, bias in enumerate([{1: 1.0, 2: 2.0}, {}, {2: 3.0}]):
        table.write(row, SamplingParams(logit_bias=bias, seed=0), 1)
    logits = torch.zeros(3, VOCABULARY)
    table.rules([(running(row, [0], 1), 1) for row in range(3)]).edit_(logits)
    assert logits.nonzero().tolist() == [[0, 1], [0, 2], [2, 2]]
    assert not table.rules([(running(1, [0], 1), 1)]).changes_logits
    assert not table.rules([]).changes_logits


def test_a_row_drops_the_filters_of_its_last_request() -> None:
    table = SamplingTable(1, VOCABULARY)
    everything = SamplingParams(
        repetition_penalty=2, presence_penalty=1, logit_bias={1: 1}, min_tokens=9, top_k=3, top_p=0.5, min_p=0.1, seed=0
    )
    for params in (everything, SamplingParams(seed=0)):
        table.write(0, params, 1, (2,))
        rules = table.rules([(running(0, [0, 3], 1), 2)])
        assert (bool(rules.edits), bool(rules.truncations)) == ((params is everything),) * 2


@pytest.mark.parametrize("vocabulary", [1, 63, 64, 1000, 30_011])
@pytest.mark.parametrize("count", [1, 2, 60])
def test_top_k_values_are_those_of_a_sort(vocabulary: int, count: int) -> None:
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(vocabulary)).round(decimals=2)
    values, columns = top_k(logits, min(count, vocabulary))
    assert torch.equal(values, logits.sort(dim=-1, descending=True).values[:, :count])
    assert torch.equal(logits.gather(1, columns), values)
    assert all(len(set(row)) == len(row) for row in columns.tolist())
    top, first = row_max(logits)
    assert torch.equal(top, logits.amax(-1))
    assert torch.equal(first, logits.argmax(-1))


def reference(logits: torch.Tensor, temperature: float, k: int, top_p: float, min_p: float) -> torch.Tensor:
    """[vocab], the log probabilities after the filters, by a full sort in double precision."""
    scaled = (logits.double() - logits.max()) / temperature
    if k:
        scaled[scaled < scaled.sort(descending=True).values[min(k, len(scaled)) - 1]] = -torch.inf
    if 0 < top_p < 1:
        order = scaled.sort(descending=True)
        before = order.values.softmax(-1).cumsum(-1) - order.values.softmax(-1)
        scaled[scaled < order.values[before < top_p][-1]] = -torch.inf
    scaled[scaled < np.log(min_p) if min_p else False] = -torch.inf
    return scaled.log_softmax(-1)


@pytest.mark.parametrize("spread", [0.02, 1.0, 5.0])
@pytest.mark.parametrize(
    "filters",
    [(0, 0.0, 0.0), (5, 0.0, 0.0), (700, 0.0, 0.0), (0, 0.3, 0.0), (0, 0.99, 0.0), (0, 0.0, 0.2), (900, 0.9, 0.01)],
)
def test_processed_log_probs_are_those_of_the_kept_tokens(spread: float, filters: tuple[int, float, float]) -> None:
    k, top_p, min_p = filters
    logits = torch.randn(5, 6000, generator=torch.Generator().manual_seed(4)) * spread
    numbers = {"top_k": k, "top_p": top_p, "min_p": min_p}
    rules = SamplingRules(
        temperature=np.full(5, 0.8, np.float32),
        keys=np.zeros(5, np.uint64),
        truncations=tuple(kind.of(np.full(5, numbers.get(kind.parameters[0], 0), kind.dtype)) for kind in TRUNCATIONS),
    )
    found = processed_log_probs(logits, rules)
    for row in range(5):
        expected = reference(logits[row], float(np.float32(0.8)), k, top_p, min_p)
        # A sum that reaches top-p to the last digit may be rounded to either side: one token more or less.
        assert abs(int(found[row].isfinite().sum()) - int(expected.isfinite().sum())) <= 1
        both = found[row].isfinite() & expected.isfinite()
        assert torch.allclose(found[row][both].double(), expected[both], atol=1e-3)


def test_processed_log_probs_of_a_greedy_row_keep_the_whole_distribution() -> None:
    logits = torch.randn(2, 50)
    rules = SamplingRules(np.float32([0, 3]), np.zeros(2, np.uint64), (TopK.of(np.int32([5, 1])),))
    assert torch.allclose(processed_log_probs(logits, rules), logits.log_softmax(-1))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(LogitBias, {"logit_bias": {3: 1.0, 4: -1.0}}), (AllowedTokens, {"allowed_token_ids": [1, 2]})],
)
def test_choices_share_the_values_of_their_edits(kind: type[TokenFilter], fields: dict[str, Any]) -> None:
    """65,536 allowed tokens with n=64 took 12 s between two steps, and 155 MiB."""
    first, second = (kind(4, VOCABULARY).start(FilterRequest(SamplingParams(**fields), 3)) for _ in range(2))
    other = kind(4, VOCABULARY + 1).start(FilterRequest(SamplingParams(**fields, n=2), 3))
    assert first is not None
    assert other is not None
    assert first is second
    length = VOCABULARY - 2 if kind is AllowedTokens else 2
    assert len(first.after([], 3)[0]) == length
    assert len(other.after([], 3)[0]) == length + (kind is AllowedTokens)


@pytest.mark.parametrize("vocabulary", [20, 3000])
def test_rows_with_the_same_allowed_tokens_share_one_array(vocabulary: int) -> None:
    """65,536 allowed tokens with n=64 took 285 MiB in each step."""
    table = AllowedTokens(4, vocabulary)
    sequences = [running(row, [*PROMPT], len(PROMPT)) for row in range(3)]
    for row, allowed in enumerate(([1, 2], None, [1, 2])):
        table.set_row(row, FilterRequest(SamplingParams(allowed_token_ids=allowed), len(PROMPT)))
    edits = table.for_batch(Draws([(sequence, len(PROMPT)) for sequence in sequences]))
    assert edits is not None
    (first, arrays), (third, others) = edits.rows
    assert (first, third) == (0, 2)
    assert arrays[0] is others[0]
    logits = torch.zeros(3, vocabulary)
    edits.apply_(logits)
    assert [torch.isfinite(row).nonzero().flatten().tolist() for row in logits] == [
        [1, 2],
        [*range(vocabulary)],
        [1, 2],
    ]
    assert torch.equal(torch.from_numpy(edits.places), torch.isinf(logits).flatten().nonzero().flatten())
    assert len(edits.values) == len(edits.places)
