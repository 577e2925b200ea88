"""Penalties whose tokens the device counts, in Triton's interpreter, against the edits of the host and in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Slices
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_support.pretended import Work, pretended_device
from gpu_support.sampling_cases import random_logits

from megatron_runtime.engine.packed_arrays import on_device
from megatron_runtime.engine.sampling import penalties
from megatron_runtime.engine.sampling.gpu_edits import GpuEdits
from megatron_runtime.engine.sampling.gpu_sampler import GpuSampler
from megatron_runtime.engine.sampling.penalties import PenaltyTable
from megatron_runtime.engine.sampling.sampling_table import SamplingRules, SamplingTable
from megatron_runtime.engine.scheduling.sequence import Sequence
from megatron_runtime.gpu.penalties import BLOCK
from megatron_runtime.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CPU = torch.device("cpu")
KINDS: tuple[dict[str, float], ...] = (
    {"frequency_penalty": 0.3},
    {"presence_penalty": -1.1},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": 0.1, "repetition_penalty": 0.9},
    {},
)
"""The penalties of requests."""


class Tables:
    """The same requests in the tables of the host and of the device."""

    def __init__(self, rows: int, vocabulary: int, longest: int = 256) -> None:
        self.vocabulary = vocabulary
        self.penalties = PenaltyTable(rows, longest, CPU)
        self.host, self.device = SamplingTable(rows, vocabulary), SamplingTable(rows, vocabulary, self.penalties)
        self._params: dict[int, SamplingParams] = {}

    def begin(self, row: int, prompt: Slices[int], **given: Any) -> Sequence:
        """A request in a row, in place of the last one."""
        self._params[row] = params = SamplingParams(**given, seed=0)
        self.host.write(row, params, len(prompt))
        self.device.write(row, params, len(prompt), counts_on_device=True)
        return Sequence(row, [*prompt], len(prompt), max_length=10**6, row=row)

    def rules(self, sequences: Slices[Sequence]) -> SamplingRules:
        """Of the device, for the next token of each."""
        return self.device.rules([(each, len(each.tokens)) for each in sequences])

    def check(self, sequences: Slices[Sequence], logits: torch.Tensor | None = None) -> None:
        """The edits of the next tokens: the bits of the host, and the values in float64."""
        logits = random_logits(len(sequences), self.vocabulary) if logits is None else logits
        found, expected = logits.clone(), logits.clone()
        GpuSampler(self.rules(sequences), self.vocabulary, CPU).edit_(found)
        self.compare(sequences, logits, found)
        self.host.rules([(each, len(each.tokens)) for each in sequences]).edit_(expected)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))

    def compare(self, sequences: Slices[Sequence], logits: torch.Tensor, found: torch.Tensor) -> None:
        """The logits with those of the formulas."""
        formulas = [self._penalized(each, row.double()) for each, row in zip(sequences, logits, strict=True)]
        assert torch.allclose(found.double(), torch.stack(formulas), rtol=1e-6, atol=1e-6, equal_nan=True)

    def _penalized(self, sequence: Sequence, logits: torch.Tensor) -> torch.Tensor:
        assert sequence.row is not None
        params = self._params[sequence.row]
        for token, bias in (params.logit_bias or {}).items():
            logits[token] += bias
        for token in set(sequence.tokens):
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token, count in Counter(sequence.tokens[sequence.prompt_length :]).items():
            logits[token] -= params.presence_penalty + params.frequency_penalty * count
        if params.allowed_token_ids is not None:
            logits[~torch.isin(torch.arange(self.vocabulary), torch.tensor(params.allowed_token_ids))] = -torch.inf
        return logits


@pytest.mark.parametrize("seed", range(4))
def test_random_histories_give_the_logits_of_the_host(seed: int) -> None:
    """Requests begin in rows of others, miss passes, repeat them, and continue elsewhere after an earlier token."""
    chance = np.random.default_rng(seed)
    tables = Tables(5, 40)

    def begin(row: int) -> Sequence:
        return tables.begin(row, chance.integers(0, 40, chance.integers(1, 30)).tolist(), **KINDS[chance.integers(5)])

    running = [begin(row) for row in range(5)]
    for _ in range(40):
        batch = [each for each in running if chance.random() < 0.8]
        for sequence in batch:
            event = chance.random()
            if event < 0.05:
                del sequence.tokens[max(sequence.prompt_length, len(sequence.tokens) - 3) :]
                tables.check([sequence])
            if event < 0.9:
                sequence.tokens.append(int(chance.integers(40)))
        if batch:
            chance.shuffle(batch)
            tables.check(batch)
        if chance.random() < 0.2:
            row = int(chance.integers(5))
            running[row] = begin(row)


@pytest.mark.parametrize("length", [BLOCK - 2, BLOCK, BLOCK + 1])
def test_lists_of_several_blocks(length: int) -> None:
    tables = Tables(1, 2 * BLOCK, longest=2 * BLOCK)
    sequence = tables.begin(0, range(length), **KINDS[3])
    for token in (3, 2 * BLOCK - 1, length - 1, length, length + 1, length, length + 2, length + 3):
        sequence.tokens.append(token)
        tables.check([sequence])


def test_logits_that_are_not_finite_stay_so() -> None:
    tables = Tables(2, 8)
    sequences = [tables.begin(row, [1, 2, 3], **KINDS[row + 2]) for row in range(2)]
    logits = random_logits(2, 8)
    logits[:, 1], logits[:, 2], logits[:, 3] = torch.nan, torch.inf, -torch.inf
    for token in (1, 2, 3, 3, 4):
        for sequence in sequences:
            sequence.tokens.append(token)
        tables.check(sequences, logits)


def test_penalties_follow_biases_and_precede_exclusions() -> None:
    tables = Tables(1, 40)
    sequence = tables.begin(0, [5, 6], **KINDS[3], logit_bias={5: 4.0, 7: 2.0}, allowed_token_ids=[*range(4, 12)])
    for token in (7, 7, 20):
        sequence.tokens.append(token)
        tables.check([sequence])


def penalized_after(
    tables: Tables, sequences: Slices[Sequence], sampled: list[int], sources: list[int]
) -> torch.Tensor:
    """The logits after tokens that only the device knows, from `random_logits`."""
    rows = np.array([each.row for each in sequences])
    rules = tables.device.rules_for_sampled(
        rows, np.array([len(each.tokens) + 1 for each in sequences]), np.array(sources)
    )
    assert rules is not None
    edits, found = GpuEdits(rules, tables.vocabulary), random_logits(len(sequences), tables.vocabulary)
    edits.apply_(found, on_device(edits.arrays, CPU), torch.tensor(sampled))
    return found


def test_tokens_that_only_the_device_knows_are_counted() -> None:
    tables = Tables(3, 40)
    first, plain, third = (tables.begin(row, [row, 9], **KINDS[kind]) for row, kind in enumerate((0, 4, 3)))
    tables.check([first, plain, third])
    for sequences, sampled, sources in (
        ([third, plain, first], [9, 11, 12], [2, 1, 0]),
        ([first, third], [12, 30, 12], [2, 0]),
        ([third], [4, 12], [1]),
    ):
        found = penalized_after(tables, sequences, sampled, sources)
        for sequence, source in zip(sequences, sources, strict=True):
            sequence.tokens.append(sampled[source])
        tables.compare(sequences, random_logits(len(sequences), 40), found)
    tables.check([first, plain, third])


def test_a_pass_without_a_token_adds_none_to_the_list() -> None:
    tables = Tables(1, 40)
    sequence = tables.begin(0, [5, 6, 5], **KINDS[2])
    tables.check([sequence])
    tables.compare([sequence], random_logits(1, 40), penalized_after(tables, [sequence], [-1], [0]))
    assert tables.penalties.counts.sizes.tolist() == [2]


def test_the_host_counts_for_a_sequence_with_more_tokens_than_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is examined at the same lengths, whether a rank has taken part in all passes or not."""
    monkeypatch.setattr(penalties, "CAPACITY", 64)
    monkeypatch.setattr(penalties, "_ROOM", 16)
    tokens = [min(place, 20) + place % 7 for place in range(90)] + [*range(30, 130)]
    left = []
    for step in (1, 5):
        tables = Tables(1, 200)
        sequence = tables.begin(0, tokens[:10], **KINDS[3])
        for length in range(11, 190, step):
            sequence.tokens[:] = tokens[:length]
            if tables.penalties.has(0) and tables.penalties.are_known(np.array([0]), np.array([length])):
                tables.check([sequence])
                continue
            known = tables.penalties.has(0)
            tables.check([sequence])
            if known and not tables.penalties.has(0):
                left.append(length)
                assert (tables.rules([sequence]).penalties, len(tables.rules([sequence]).edits)) == (None, 2)
    first, second = left
    assert 0 <= second - first < 5
    assert len(set(tokens[:first])) <= 64


def test_a_pass_with_penalties_is_one_more_launch(device_guard: Path) -> None:
    del device_guard
    with pretended_device() as device:
        gpu = torch.device("cuda")
        table = SamplingTable(2, 40, PenaltyTable(2, 64, gpu))
        for row in range(2):
            table.write(row, SamplingParams(**KINDS[3], temperature=0.8, seed=row), 3, counts_on_device=True)
        sequences = [Sequence(row, [1, 2, 3], 3, max_length=64, row=row) for row in range(2)]
        found = []
        for _ in range(3):
            device.work = Work()
            rules = table.rules([(each, len(each.tokens)) for each in sequences])
            logits = random_logits(2, 40).to("cuda")
            device.work = Work()
            sampler = GpuSampler(rules, 40, gpu)
            sampler.edit_(logits)
            found.append((device.work.launches, device.work.pinned_copies))
            assert (+device.work.waits, +device.work.copies) == ({}, {})
            for sequence in sequences:
                sequence.tokens.append(7)
    assert found == [(2, 1), (1, 1), (1, 1)], "the first one writes the lists"
