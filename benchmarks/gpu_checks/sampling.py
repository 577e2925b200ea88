"""Whether a GPU edits logits, truncates and samples as the CPU does."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from gpu_support.sampling_cases import edits_of, logits_that_are_not_finite, random_logits, rules_for
from torch import Tensor

from gpu_checks.results import DEVICE, Check, Result, Sizes
from megatron_runtime.engine.sampling.filters.truncations import MinP, TopK, TopNSigma, TopP, Truncation
from megatron_runtime.engine.sampling.penalties import PenaltyTable
from megatron_runtime.engine.sampling.sampler import make_sampler, processed_log_probs, sample
from megatron_runtime.engine.sampling.sampling_table import SamplingRules, SamplingTable
from megatron_runtime.engine.scheduling.sequence import Sequence
from megatron_runtime.sampling_params import SamplingParams

ROWS = 8
LOG_PROBS_LIMIT = 1e-4
"""Largest difference of a log probability in float32."""


def checks(sizes: Sizes) -> Iterator[Check]:
    """Over the vocabulary of the model."""
    yield "sampled tokens", partial(check_tokens, sizes.vocabulary)
    yield "edited logits", partial(check_edits, sizes.vocabulary)
    yield "counted penalties", partial(check_penalties, sizes.vocabulary)
    yield "log probabilities", partial(check_log_probs, sizes.vocabulary)


def check_tokens(vocabulary: int) -> Iterator[Result]:
    """With all truncations, also of logits that are not finite; the edge of a top-p may be rounded differently."""
    sigma, top_k, min_p = truncations(ROWS)
    rules = rules_for(ROWS, 0.8, truncations=(sigma, top_k, TopP.of(np.full(ROWS, 0.9, np.float32)), min_p))
    yield sampled("sampled tokens", random_logits(ROWS, vocabulary), rules)
    logits = logits_that_are_not_finite(vocabulary)
    for kind, temperature in (("greedy", 0.0), ("truncated", 0.8)):
        rules = rules_for(len(logits), temperature, truncations=truncations(len(logits)))
        yield sampled(f"sampled tokens, some logits not finite, {kind}", logits, rules)


def check_edits(vocabulary: int) -> Iterator[Result]:
    """All kinds: their operations are rounded alike on all devices. Then the tokens after them."""
    logits, rules = random_logits(2, vocabulary), rules_for(2, 0.8, edits=edits_of(vocabulary))
    there = logits.to(DEVICE)
    make_sampler(rules, vocabulary, there.device).edit_(there)
    rules.edit_(logits)
    differing = int((there.cpu() != logits).sum())
    yield Result("edited logits", f"{differing} of {logits.numel()} differ", "0", is_wrong=differing > 0)
    yield sampled("edited logits, sampled tokens", logits, rules)


def check_penalties(vocabulary: int) -> Iterator[Result]:
    """Of tokens that the device counts: those of a list of the host, and those that it adds."""
    chance = np.random.default_rng(0)
    tables = SamplingTable(ROWS, vocabulary), SamplingTable(ROWS, vocabulary, PenaltyTable(ROWS, 4096, DEVICE))
    given = SamplingParams(frequency_penalty=0.3, presence_penalty=0.7, repetition_penalty=1.3, seed=0)
    sequences = []
    for row in range(ROWS):
        tokens = (vocabulary * chance.random(2000) ** 3).astype(int).tolist()
        sequences.append(Sequence(row, tokens, 500, max_length=4096, row=row))
        for table in tables:
            table.write(row, given, 500, counts_on_device=True)
    differing, logits = 0, random_logits(ROWS, vocabulary)
    for _ in range(3):
        prefixes = [(each, len(each.tokens)) for each in sequences]
        expected, there = logits.clone(), logits.to(DEVICE, copy=True)
        tables[0].rules(prefixes).edit_(expected)
        make_sampler(tables[1].rules(prefixes), vocabulary, there.device).edit_(there)
        differing += int((there.cpu() != expected).sum())
        for sequence in sequences:
            sequence.tokens.append(int(chance.integers(vocabulary)) if sequence.row else sequence.tokens[600])
    yield Result("counted penalties", f"{differing} of {3 * logits.numel()} differ", "0", is_wrong=differing > 0)


def check_log_probs(vocabulary: int) -> Iterator[Result]:
    """Of the distribution that is sampled: excluded tokens, and the values of all others."""
    logits, rules = random_logits(ROWS, vocabulary), rules_for(ROWS, 0.8, truncations=truncations(ROWS))
    there = logits.to(DEVICE)
    found = make_sampler(rules, vocabulary, there.device).processed_log_probs(there).cpu()
    yield near_log_probs("log probabilities of the sampled distribution", found, processed_log_probs(logits, rules))


def near_log_probs(name: str, found: Tensor, expected: Tensor) -> Result:
    """By the largest difference; minus infinity has to be at the same places."""
    kept = expected.isfinite()
    differing = int((found.isfinite() != kept).sum())
    error = float((found - expected)[kept].abs().max())
    words = f"error {error:.1e}" if differing == 0 else f"{differing} of {found.numel()} are excluded by one side alone"
    return Result(name, words, f"{LOG_PROBS_LIMIT:.1e}", is_wrong=differing > 0 or not error <= LOG_PROBS_LIMIT)


def truncations(rows: int) -> tuple[Truncation, ...]:
    """Those whose thresholds depend on no sum, in the order in which they apply."""
    return (
        TopNSigma.of(np.full(rows, 3, np.float32)),
        TopK.of(np.full(rows, 50, np.int32)),
        MinP.of(np.full(rows, 0.01, np.float32)),
    )


def sampled(name: str, logits: Tensor, rules: SamplingRules) -> Result:
    """Tokens of the device against those of the CPU, by the rules without their edits."""
    there = logits.to(DEVICE)
    found = make_sampler(rules, logits.shape[1], there.device).sample(there).cpu().tolist()
    differing = sum(one != other for one, other in zip(found, sample(logits, rules).tolist(), strict=True))
    return Result(name, f"{differing} of {len(found)} differ", "0", is_wrong=differing > 0)
