"""Works on large request bodies, and on those with grammars, outside the event loop."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, ParamSpec, TypeVar

LARGE_BODY_BYTES = 32 * 1024
"""Above this size, the work on a body takes longer than its way to a thread and back."""

P = ParamSpec("P")
T = TypeVar("T")


class LargeBodies:
    """Parses, validates and tokenizes large bodies in one thread, one after the other, the shortest first.

    Small requests are served meanwhile, and the memory that the work takes is that of one body. Grammars of small
    bodies are checked in a second thread, because the time for a grammar does not follow from its size.
    """

    def __init__(self) -> None:
        self._turns = _Turns()
        self._bodies = _ShortestFirst("large-bodies")
        self._grammars = _ShortestFirst("grammars")

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of ``work`` for a body of ``size`` bytes; small ones are worked on at once."""
        if size <= LARGE_BODY_BYTES:
            return work(*args, **kwargs)
        return await self._bodies.run(size, partial(work, *args, **kwargs))

    async def turn(self, size: int) -> Turn:
        """The turn of a body of ``size`` bytes, which it keeps from its first work to its last; small ones do not wait.

        A parsed body takes several times its bytes, also while it waits for more work.
        """
        if size <= LARGE_BODY_BYTES:
            return Turn(None)
        await self._turns.take(size)
        return Turn(self._turns)

    async def run_with_grammar(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same for a body with a grammar, which is never worked on in the event loop."""
        thread = self._grammars if size <= LARGE_BODY_BYTES else self._bodies
        return await thread.run(size, partial(work, *args, **kwargs))


class Turn:
    """The turn of a body."""

    def __init__(self, turns: _Turns | None) -> None:
        self._turns = turns

    def end(self) -> None:
        """The work on the body is done, or it is refused. Further calls have no effect."""
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.end()


class _Turns:
    """A lock, which the smallest body gets first that waits."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    async def take(self, size: int) -> None:
        if not self._is_taken:
            self._is_taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (size, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.end()
            raise

    def end(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False


class _Waiting(NamedTuple):
    size: int
    number: int
    """Works of the same size are done in the order of their arrival."""
    work: Callable[[], Any]
    result: Future[Any]


class _ShortestFirst:
    """One thread, which does the smallest work first that waits."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._lock = Lock()
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of ``work``; work that is cancelled before its turn is not done."""
        # The future is no variable here, because an error would then refer to itself by its traceback.
        return await asyncio.wrap_future(self._add(size, work))

    def _add(self, size: int, work: Callable[[], T]) -> Future[T]:
        result: Future[T] = Future()
        with self._lock:
            heapq.heappush(self._waiting, _Waiting(size, next(self._numbers), work, result))
        self._thread.submit(self._do_smallest)
        return result

    def _do_smallest(self) -> None:
        with self._lock:
            _, _, work, result = heapq.heappop(self._waiting)
        if not result.set_running_or_notify_cancel():
            return
        try:
            done = work()
        except BaseException as error:
            result.set_exception(error)
            del result, work  # The error refers to these variables by its traceback, and would keep the body until gc.
        else:
            result.set_result(done)
