"""Shares of work side by side."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from megatron_runtime.model.threads import run_shares


def test_every_share_is_done_once_and_empty_ones_are_left_out() -> None:
    done: list[tuple[int, int]] = []
    run_shares(lambda first, last: done.append((first, last)), np.array([0, 3, 3, 7, 9]))
    assert sorted(done) == [(0, 3), (3, 7), (7, 9)]


def test_shares_run_at_the_same_time() -> None:
    meeting = threading.Barrier(3)
    run_shares(lambda _first, _last: meeting.wait(timeout=30) and None, np.array([0, 1, 2, 3]))


def test_an_error_of_any_share_is_raised_after_all_have_ended() -> None:
    ended = threading.Event()

    def work(first: int, _last: int) -> None:
        if first == 0:
            raise ValueError("first")
        ended.wait(timeout=0.2)
        ended.set()

    with pytest.raises(ValueError, match="first"):
        run_shares(work, np.array([0, 1, 2]))
    assert ended.is_set()
