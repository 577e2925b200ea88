"""Which tokens the draft model has computed, in blocks that sequences share and take over."""

from __future__ import annotations

from megatron_runtime.engine.draft_coverage import DraftCoverage
from megatron_runtime.engine.scheduling.sequence import Sequence


def sequence(*blocks: int) -> Sequence:
    return Sequence(0, [], 0, 100, blocks=list(blocks))


def test_computed_tokens_count_until_they_are_replaced() -> None:
    coverage, one = DraftCoverage(8, 4), sequence(5, 2, 7)
    coverage.replaced(one, 0, 9)
    assert coverage.end(one, 9) == 0
    coverage.computed(one, 0, 6)
    assert coverage.end(one, 9) == 6
    assert coverage.end(one, 5) == 5
    coverage.replaced(one, 5, 6)  # a wrong draft
    assert coverage.end(one, 6) == 5
    coverage.computed(one, 5, 10)
    assert coverage.end(one, 10) == 10


def test_a_gap_hides_the_tokens_behind_it() -> None:
    coverage, one = DraftCoverage(8, 4), sequence(0, 1, 2)
    coverage.computed(one, 0, 12)
    coverage.replaced(one, 4, 5)
    assert coverage.end(one, 12) == 4
    coverage.computed(one, 4, 8)
    assert coverage.end(one, 12) == 12


def test_a_shared_block_counts_for_both_and_a_new_owner_begins_anew() -> None:
    coverage, one, two = DraftCoverage(8, 4), sequence(3, 4), sequence(3, 6)
    coverage.computed(one, 0, 8)
    coverage.replaced(two, 4, 6)
    assert coverage.end(two, 6) == 4
    later = sequence(4)
    coverage.replaced(later, 0, 2)
    assert coverage.end(later, 2) == 0
