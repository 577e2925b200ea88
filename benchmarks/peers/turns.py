"""Runs contenders in turn, and summarizes their results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Contender = TypeVar("Contender")
Turn = TypeVar("Turn")


def run_in_turn(
    contenders: Sequence[Contender], rounds: int, run: Callable[[Contender, int], Turn]
) -> dict[Contender, list[Turn]]:
    """The results of each contender in each round.

    They run in turn, so that other load on the machine affects all, and in the opposite order in each second round, so
    that a machine that becomes slower or faster favours none.
    """
    turns: dict[Contender, list[Turn]] = {contender: [] for contender in contenders}
    for number in range(rounds):
        for contender in contenders[:: -1 if number % 2 else 1]:
            turns[contender].append(run(contender, number))
    return turns


def ratio_cells(ratios: Sequence[float]) -> list[str]:
    """Median and range as cells of a table; empty cells without ratios."""
    if not ratios:
        return ["", ""]
    return [f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]


def quantile(values: Iterable[float], share: float) -> float:
    """The value that ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
