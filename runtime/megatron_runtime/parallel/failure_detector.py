"""Detects lost ranks after a failure: every live rank answers a call."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from megatron_runtime.errors import LostRankError
from megatron_runtime.parallel.layout import RankPosition
from megatron_runtime.parallel.rendezvous import Rendezvous

logger = logging.getLogger(__name__)

PATIENCE = 2.0
"""Seconds within which a live rank answers."""
COMPUTING = "computing"
_PAUSE = 0.5
_FOREVER = timedelta(days=365)
_CLOSED = "closed"
_NONE_LOST = "-"


class FailureDetector:
    """The detector of one rank. A thread waits for a call in the store, without using the processor.

    The first rank that detects a failure calls all others. Its result is the verdict of all ranks, so that ranks which
    fail because that rank has left do not report it as lost.

    Args:
        rendezvous: Provides connections to the store, and is kept alive by this object.
        position: The place of this rank.
    """

    def __init__(self, rendezvous: Rendezvous, position: RankPosition) -> None:
        self._rendezvous = rendezvous
        self.store = rendezvous.connect(PATIENCE)
        self.doing = COMPUTING
        """Set the activity of this rank, which others report."""
        self.on_verdict: Callable[[], None] | None = None
        """Called in another thread once another rank has found lost or late ranks."""
        self._position = position
        self._others = position.others
        self._verdict: str | None = None
        self._calling = threading.Lock()
        self._is_cut_off = False
        self._thread = threading.Thread(
            target=self._answer, args=(rendezvous.connect(PATIENCE),), name="failure-detector", daemon=True
        )
        self._thread.start()

    def lost(self, doing: str, cause: Exception, missing: list[int] | None = None) -> LostRankError:
        """The error with the lost ranks: ``missing``, or those that don't answer within PATIENCE seconds."""
        with self._calling:
            found = self._find(missing)
            if self._position.is_first:
                time.sleep(_PAUSE)  # The store may end with this rank, and the others have to read the verdict before.
        reason = (str(cause) or type(cause).__name__).splitlines()[0]
        return LostRankError(f"{self._position}: {doing}: {self._describe(found)} ({reason})", missing=found)

    def close(self) -> None:
        """End the thread."""
        if self._is_cut_off:
            return
        with contextlib.suppress(RuntimeError):
            self.store.set(_call(self._position.rank), _CLOSED)
            self._thread.join(PATIENCE)

    def _describe(self, missing: list[int]) -> str:
        if missing:
            named = ", ".join(_full_name(self._position, rank) for rank in missing)
            return f"{named} {'is' if len(missing) == 1 else 'are'} missing"
        doings = [f"rank {rank} is {doing}" for rank, doing in self._doings()]
        return "all ranks answer, so one is late" + "".join(f"; {doing}" for doing in doings)

    def _find(self, known: list[int] | None) -> list[int]:
        """The ranks that don't answer. Without a store that is the first rank, unless it left a verdict."""
        try:
            if self._take_place() == 1:
                return self._call(known)
            verdict = self._wait_for_verdict(self.store)
            return self._call(known) if verdict is None else _read(verdict)
        except RuntimeError:
            self._thread.join(2 * PATIENCE)
            return [0] if self._verdict is None else _read(self._verdict)
        except TimeoutError:
            self._is_cut_off = True
            return [0]

    def _take_place(self) -> int:
        """Register this rank's call, and return its number.

        Raises RuntimeError if the store has ended, and TimeoutError if it is unreachable: a reachable store answers at
        once. The request runs in a thread, because torch waits for its answer without a limit.
        """
        places: SimpleQueue[int] = SimpleQueue()

        def take() -> None:
            try:
                places.put(self.store.add("calls", 1))
            except RuntimeError:
                places.put(0)

        if not self._is_cut_off:
            threading.Thread(target=take, name="failure-detector-place", daemon=True).start()
        try:
            place = places.get(timeout=PATIENCE)
        except Empty:
            raise TimeoutError("the store is not reached") from None
        if not place:
            raise RuntimeError("the store has ended")
        return place

    def _call(self, known: list[int] | None) -> list[int]:
        for rank in self._others:
            self.store.set(_call(rank), "")
        missing = self._unanswered() if known is None else known
        self.store.set("verdict", ",".join(map(str, missing)) or _NONE_LOST)
        with contextlib.suppress(RuntimeError):
            self.store.check(["verdict"])  # This process may end at once, before the unacknowledged set has left it.
        return missing

    def _unanswered(self) -> list[int]:
        answers = {rank: f"answer/{rank}" for rank in self._others}
        with contextlib.suppress(DistStoreError):
            self.store.wait(list(answers.values()), timedelta(seconds=PATIENCE))
        return [rank for rank, key in answers.items() if not self.store.check([key])]

    def _answer(self, store: Store) -> None:
        with contextlib.suppress(RuntimeError):
            store.wait([_call(self._position.rank)], _FOREVER)
            if store.get(_call(self._position.rank)).decode() == _CLOSED:
                return
            logger.warning("%s answers the failure detector: %s", self._position, self.doing)
            store.set(f"answer/{self._position.rank}", self.doing)
            self._verdict = self._wait_for_verdict(store)
            if self._verdict is not None and self.on_verdict is not None:
                self.on_verdict()

    def _wait_for_verdict(self, store: Store) -> str | None:
        with contextlib.suppress(DistStoreError):
            store.wait(["verdict"], timedelta(seconds=2 * PATIENCE))
            return str(store.get("verdict").decode())
        return None

    def _doings(self) -> list[tuple[int, str]]:
        with contextlib.suppress(RuntimeError):
            answered = [rank for rank in self._others if self.store.check([f"answer/{rank}"])]
            return [(rank, self.store.get(f"answer/{rank}").decode()) for rank in answered]
        return []


def _call(rank: int) -> str:
    return f"call/{rank}"


def _read(verdict: str) -> list[int]:
    return [] if verdict == _NONE_LOST else [int(rank) for rank in verdict.split(",")]


def _full_name(me: RankPosition, rank: int) -> str:
    return me.sizes.position_in_replica_group(rank, me.replica_group).name
