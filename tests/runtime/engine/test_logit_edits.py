"""Penalties, biases and forbidden tokens equal their definitions, truncation equals a full sort."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.engine.sampling.logit_edits import RequestEdits, merged
from megatron_runtime.engine.sampling.sampler import processed_log_probs
from megatron_runtime.engine.sampling.sampling_table import SamplingRules
from megatron_runtime.engine.sampling.top_k import row_max, top_k
from megatron_runtime.sampling_params import SamplingParams

VOCABULARY = 20
PROMPT = [3, 3, 5]
ANSWER = [7, 5, 7, 9]


def edited(params: SamplingParams, tokens: list[int], *, stop_ids: tuple[int, ...] = ()) -> torch.Tensor:
    """One row of logits -5, -4, ... after the edits for the next token."""
    edits = merged([(0, *RequestEdits(params, len(PROMPT), stop_ids, VOCABULARY).after(tokens, len(tokens)))])
    logits = torch.arange(VOCABULARY, dtype=torch.float32)[None] - 5
    if edits is not None:
        edits.apply_(logits)
    return logits[0]


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
    grown = RequestEdits(params, len(PROMPT), (1, 2), VOCABULARY)
    for length in [
        *range(len(PROMPT), len(tokens) + 1),
        *(jump for jump in jumps if len(PROMPT) <= jump <= len(tokens)),
    ]:
        fresh = RequestEdits(params, len(PROMPT), (1, 2), VOCABULARY).after(tokens, length)
        here = grown.after(tokens, length)
        assert {token: tuple(here[1][:, i]) for i, token in enumerate(here[0])} == {
            token: tuple(fresh[1][:, i]) for i, token in enumerate(fresh[0])
        }


def test_edits_of_thousands_of_tokens_are_complete() -> None:
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, logit_bias=dict.fromkeys(range(100), 1.0))
    tokens = [*range(3000), *range(3000, 4000)]
    found, values = RequestEdits(params, 3000, (), 5000).after(tokens, 4000)
    assert sorted(found) == tokens
    assert (values[1] == 2).all()
    assert sorted(found[values[0] == 1]) == list(range(100))
    assert sorted(found[values[2] == 1]) == list(range(3000, 4000))


def test_edits_stay_in_their_rows() -> None:
    first = RequestEdits(SamplingParams(logit_bias={1: 1.0, 2: 2.0}), 1, (), VOCABULARY).after([0], 1)
    last = RequestEdits(SamplingParams(logit_bias={2: 3.0}), 1, (), VOCABULARY).after([0], 1)
    logits = torch.zeros(3, VOCABULARY)
    edits = merged([(0, *first), (2, *last)])
    assert edits is not None
    edits.apply_(logits)
    assert logits.nonzero().tolist() == [[0, 1], [0, 2], [2, 2]]
    assert merged([]) is None


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
    """[vocab], the log probabilities after the filters, by a sort of everything in double precision."""
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
    full = np.full
    rules = SamplingRules(
        temperature=full(5, 0.8, np.float32),
        top_k=full(5, k, np.int32),
        top_p=full(5, top_p, np.float32),
        min_p=full(5, min_p, np.float32),
        keys=np.zeros(5, np.uint64),
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
    zero = np.zeros(2, np.float32)
    rules = SamplingRules(np.float32([0, 3]), np.int32([5, 1]), zero, zero, np.zeros(2, np.uint64))
    assert torch.allclose(processed_log_probs(logits, rules), logits.log_softmax(-1))
