"""Contenders that take turns, and the ratios of what they did."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

Contender = TypeVar("Contender")
Turn = TypeVar("Turn")


def take_turns(
    contenders: Sequence[Contender], rounds: int, run: Callable[[Contender, int], Turn]
) -> dict[Contender, list[Turn]]:
    """What each contender did in each round; in turn, so that what disturbs the machine disturbs all."""
    turns: dict[Contender, list[Turn]] = {contender: [] for contender in contenders}
    for number in range(rounds):
        for contender in contenders:
            turns[contender].append(run(contender, number))
    return turns


def ratio_cells(ratios: Sequence[float]) -> list[str]:
    """Their median, and the least to the greatest, as cells of a table; empty ones where there are no ratios."""
    if not ratios:
        return ["", ""]
    return [f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
