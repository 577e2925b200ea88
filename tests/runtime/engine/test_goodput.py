"""Drafts are permitted as far as they are worth their time: passes are simulated, with times and right drafts given."""

from __future__ import annotations

import random
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import pytest

from megatron_runtime.engine.scheduling.draft_length import DraftLength
from megatron_runtime.engine.scheduling.goodput import Goodput
from megatron_runtime.engine.scheduling.pass_time import PassTime


@dataclass
class Simulation:
    """Decode passes of some sequences; times are those of a pass with one row and no drafts."""

    right: float
    """Probability that a draft behind right ones is right."""
    round_time: float
    """Of a pass of the draft model."""
    row_time: float = 0.03
    sequences: int = 1
    most: int = 7
    noise: float = 0.0
    """Largest relative deviation of a time."""
    unit: float = 1.0
    catch_up: int = 0
    """Tokens that the draft model computes before its first draft after passes without one."""
    goodput: Goodput = field(default_factory=Goodput)
    random: random.Random = field(default_factory=lambda: random.Random(1))
    seconds: float = 0.0
    tokens: int = 0
    drafts: int = 0

    def run(self, passes: int) -> float:
        """Speed of these passes, relative to passes without drafts; lengths adapt to each sequence as in the engine."""
        lengths = [DraftLength(self.most) for _ in range(self.sequences)]
        self.seconds = self.tokens = self.drafts = 0
        has_rested = True
        for _ in range(passes):
            wanted = [length.within(self.most) for length in lengths]
            drafts = self.goodput.permitted(self.sequences, self.sequences, wanted)
            self._pass(lengths, drafts, caught_up=self.catch_up if has_rested and any(drafts) else 0)
            has_rested = not any(drafts)
        return self.tokens / self.seconds / (self.sequences / self._time(self.sequences))

    def _pass(self, lengths: Many[DraftLength], drafts: Many[int], caught_up: int) -> None:
        accepted = [self._accepted(count) for count in drafts]
        widths = [sum(count > number for count in drafts) for number in range(max(drafts))]
        if widths:
            widths[0] += caught_up
        rounds = [(rows, self._noisy(self.round_time * self._time(rows))) for rows in widths]
        seconds = self._noisy(self._time(self.sequences + sum(drafts)))
        for length, count, right in zip(lengths, drafts, accepted, strict=True):
            if count:
                length.note(count, right)
                self.goodput.note_drafts(count, right)
        self.goodput.note_pass(
            rows=self.sequences,
            sampled=self.sequences,
            drafts=sum(drafts),
            accepted=sum(accepted),
            seconds=seconds,
            rounds=rounds,
        )
        self.seconds += seconds + sum(each for _, each in rounds)
        self.tokens += self.sequences + sum(accepted)
        self.drafts += sum(drafts)

    def _accepted(self, count: int) -> int:
        return next((place for place in range(count) if self.random.random() >= self.right), count)

    def _time(self, rows: int) -> float:
        return self.unit * (1 + self.row_time * (rows - 1))

    def _noisy(self, seconds: float) -> float:
        return seconds * self.random.uniform(1 - self.noise, 1 + self.noise)


@pytest.mark.parametrize("sequences", [1, 8, 32])
@pytest.mark.parametrize("round_time", [0.0, 0.25, 1.0, 3.0])
@pytest.mark.parametrize("right", [0.0, 0.3, 0.9, 1.0])
def test_drafts_never_cost_more_than_a_few_percent(right: float, round_time: float, sequences: int) -> None:
    simulation = Simulation(right, round_time, sequences=sequences, noise=0.3)
    assert simulation.run(500) > 0.95
    assert simulation.run(500) > 0.95


@pytest.mark.parametrize(("right", "round_time"), [(0.0, 0.5), (0.3, 1.0), (1.0, 1.5)])
def test_a_draft_model_that_costs_more_than_it_saves_is_tried_rarely(right: float, round_time: float) -> None:
    simulation = Simulation(right, round_time)
    simulation.run(100)
    simulation.run(1000)
    assert 0 < simulation.drafts < 50


@pytest.mark.parametrize(
    ("right", "round_time", "sequences", "speed"),
    [
        (1.0, 0.1, 1, 4.1),
        (0.9, 0.1, 1, 2.3),
        (0.7, 0.1, 1, 1.4),
        (1.0, 0.5, 1, 1.6),
        (0.9, 0.05, 8, 1.7),
        (1, 0, 32, 1.7),
    ],
)
def test_drafts_that_are_cheap_and_right_are_used(
    right: float, round_time: float, sequences: int, speed: float
) -> None:
    simulation = Simulation(right, round_time, sequences=sequences, noise=0.2)
    assert simulation.run(200) > speed
    assert simulation.run(1000) > speed


@pytest.mark.parametrize("right", [0.5, 0.7, 0.8, 0.9])
def test_drafts_are_nearly_as_fast_as_with_the_best_constant_number(right: float) -> None:
    """Also while some passes have wrong drafts alone, which are never too many to be made up for by the others."""
    simulation = Simulation(right, round_time=0.13, row_time=0.08, noise=0.1)
    simulation.run(100)
    constant = [
        (1 - right ** (count + 1)) / (1 - right) / (1 + count * (simulation.row_time + simulation.round_time))
        for count in range(simulation.most + 1)
    ]
    assert simulation.run(1000) > 0.92 * max(constant)


@pytest.mark.parametrize(("round_time", "speed"), [(0.13, 0.95), (1.0, 0.92)])
def test_the_first_passes_of_an_engine_lose_little(round_time: float, speed: float) -> None:
    assert Simulation(0.0, round_time, row_time=0.08).run(60) > speed


def test_the_number_of_drafts_depends_on_their_costs() -> None:
    counts = {}
    for round_time in (0.05, 0.2, 0.4, 0.8):
        simulation = Simulation(0.7, round_time, noise=0.1)
        simulation.run(300)
        for _ in range(100):
            simulation.goodput.note_drafts(7, 2)  # as for a fraction of 2 of 3
        counts[round_time] = simulation.goodput.permitted(1, 1, [7])[0]
    assert counts[0.05] > counts[0.2] > counts[0.4] >= counts[0.8]


def test_drafts_that_become_right_are_used_soon() -> None:
    simulation = Simulation(0.0, round_time=0.2)
    assert simulation.run(500) > 0.97
    simulation.right = 0.95
    assert simulation.run(300) > 1.5


def test_drafts_that_become_wrong_are_given_up_soon() -> None:
    simulation = Simulation(1.0, round_time=0.2)
    assert simulation.run(500) > 2.5
    simulation.right = 0.0
    assert simulation.run(300) > 0.95


def test_a_draft_model_that_becomes_slow_is_given_up_and_one_that_becomes_fast_is_used() -> None:
    simulation = Simulation(0.9, round_time=0.1)
    assert simulation.run(500) > 2
    simulation.round_time = 1.0
    assert simulation.run(500) > 0.95
    simulation.round_time = 0.1
    assert simulation.run(1000) > 1.5


def test_other_load_changes_nothing() -> None:
    """All times become five times as long, and short again."""
    simulation = Simulation(0.9, round_time=0.1)
    speeds = []
    for factor in (1, 5, 1):
        simulation.unit = factor
        speeds.append(simulation.run(500))
    assert min(speeds) > 2


def test_what_a_draft_model_catches_up_with_counts() -> None:
    """Each trial computes a thousand tokens of a prompt first."""
    simulation = Simulation(0.0, round_time=0.2, catch_up=1000)
    simulation.run(300)
    assert simulation.run(3000) > 0.97


def test_all_drafts_are_permitted_where_passes_take_no_time() -> None:
    simulation = Simulation(1.0, round_time=0.0, sequences=2)
    simulation.unit = 0
    for _ in range(100):
        assert simulation.goodput.permitted(2, 2, [7, 0]) in ([7, 0], [1, 0])
        simulation._pass([DraftLength(7), DraftLength(7)], [7, 0], caught_up=0)
    assert simulation.goodput.permitted(2, 2, [7, 0]) == [7, 0]


def test_the_time_of_a_pass_is_a_line_through_the_latest_ones() -> None:
    time = PassTime()
    assert not time.is_known
    time.note(1, 100.0)  # compiles kernels
    assert not time.is_known
    for rows in (1, 2, 8) * 3:
        time.note(rows, 2.0 + 0.5 * rows)
    assert [time.of(rows) for rows in (1, 4, 100)] == pytest.approx([2.5, 4.0, 52.0])
    time.note(1, 1000.0)
    assert time.of(1) < 2 * 2.5
    for _ in range(200):
        time.note(1, 2.5)
    assert time.of(1) == pytest.approx(2.5, rel=0.01)


def test_a_row_is_expected_to_cost_nothing_until_two_numbers_of_rows_are_known() -> None:
    time = PassTime()
    for _ in range(5):
        time.note(4, 3.0)
    assert time.of(1) == time.of(100) == pytest.approx(3.0)


def test_a_pass_never_takes_negative_time() -> None:
    time = PassTime()
    for rows, seconds in ((0, 0), (10, 1.0), (11, 3.0), (12, 5.0)):
        time.note(rows, seconds)
    assert 0 <= time.of(1) < time.of(10) < time.of(20)
