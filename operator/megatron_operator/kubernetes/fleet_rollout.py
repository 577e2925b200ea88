"""The fleet rollout: which resources may take the default image of a new version of the operator now.

Resources get their turn by namespace and name, a few at a time, once they are settled. One whose pods do not become
ready with the new image keeps its turn, so that an image that does not work stops at the first resources.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from megatron_operator.metrics import Meters
from megatron_operator.runtime_image import ImageState

FIRST_TURN = 30.0
"""Seconds from the start of leading to the first turn. By then a resource that was upgrading has been observed."""

Key = tuple[str, str]


class FleetRollout:
    """The turns of all resources of one operator."""

    def __init__(self, max_concurrent: int, meters: Meters, wake: Callable[[Key], None]) -> None:
        """``max_concurrent`` 0 gives no turns. ``wake`` triggers a round of a resource that has got its turn."""
        self._max_concurrent = max_concurrent
        self._meters = meters
        self._wake = wake
        self._states: dict[Key, ImageState] = {}
        self._waiting: set[Key] = set()
        self._turns: set[Key] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._has_begun = False
        self._count()

    def start(self, delay: float = FIRST_TURN) -> None:
        """Give the first turns after ``delay`` seconds."""
        self._timer = asyncio.get_running_loop().call_later(delay, self._begin)

    def stop(self) -> None:
        """Take all turns back."""
        if self._timer is not None:
            self._timer.cancel()
        self._has_begun = False
        for known in (self._states, self._waiting, self._turns):
            known.clear()
        self._count()

    def has_turn(self, key: Key) -> bool:
        """Whether the resource may take the new default image."""
        return key in self._turns

    def observed(self, key: Key, state: ImageState, *, is_settled: bool) -> None:
        """A round of the resource has ended."""
        self._states[key] = state
        if is_settled:  # While it upgrades, only a paused or partitioned rollout is settled.
            self._turns.discard(key)
        elif state is ImageState.UPGRADING:
            self._turns.add(key)
        (self._waiting.add if is_settled and state is ImageState.WAITING else self._waiting.discard)(key)
        self._give_turns()

    def forget(self, key: Key) -> None:
        """The resource is gone."""
        self._states.pop(key, None)
        self._waiting.discard(key)
        self._turns.discard(key)
        self._give_turns()

    def _begin(self) -> None:
        self._has_begun = True
        self._give_turns()

    def _give_turns(self) -> None:
        while self._has_begun and self._waiting and len(self._turns) < self._max_concurrent:
            key = min(self._waiting)
            self._waiting.discard(key)
            self._turns.add(key)
            self._wake(key)
        self._count()

    def _count(self) -> None:
        for state in ImageState:
            count = sum(each is state for each in self._states.values())
            self._meters.fleet_rollout(state, count)
