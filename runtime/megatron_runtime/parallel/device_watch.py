"""Ends waits for a device when a rank is lost: kernels that wait for its part of a sum would never end.

On a CPU the host waits itself, and notices at once that a connection has ended. On a GPU the host waits for its own
device, and a library such as NCCL does not notice that the other process has ended.

What nothing can abort, as kernels that poll symmetric memory, never ends. There the host asks whether an event has
occurred, instead of waiting for it, and goes on once the watch has found the lost rank. The device, and what it has
computed, is of no use from then on, and neither is this process.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from megatron_runtime.errors import LostRankError
from megatron_runtime.parallel.exit_limit import limit_exit
from megatron_runtime.parallel.failure_detector import FailureDetector

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DEVICE_ERROR: type[Exception] = getattr(torch, "AcceleratorError", RuntimeError)
"""The second is what PyTorch raises before 2.8."""
_GRACE = 1.0
"""Seconds that work goes on after a connection has ended. A rank that leaves in order has done all work of others."""
_LAST_GRACE = 5.0
"""Seconds after which work has to have ended, once it is aborted."""
_PERIOD, _SHORT_PERIOD = 1.0, 0.1
"""Seconds between two looks at the time that work takes; the short one once a connection has ended."""
_EVENT_PERIOD = 2e-5
"""Seconds between two looks at an event of the device."""
_VERDICT = 10.0
"""Seconds from the end of a connection until a lost rank is named, at most."""


class DeviceWatch:
    """A thread that waits for the end of a connection, for the verdict of another rank's failure detector, and for the
    time limit of supervised work. Then it aborts the device's work, so that the waiting host goes on.

    Args:
        ends: Connections to other ranks. Their owners close them after this object.
        failure_detector: Finds lost ranks.
        abort: Ends the waits of host and device for other ranks.
        timeout: Seconds that supervised work may take.
    """

    def __init__(
        self,
        ends: Iterable[socket.socket],
        failure_detector: FailureDetector,
        abort: Callable[[], None],
        timeout: float,
    ) -> None:
        self._failure_detector = failure_detector
        self._abort = abort
        self._timeout = timeout
        self.act: Callable[[LostRankError], None] | None = None
        """Called if this object is not closed within seconds after an abort, which may fail itself. Without it, the
        process ends then if the host still waits."""
        self._work: tuple[float, float] | None = None
        """The beginning and the end of the time for the work that is supervised."""
        self._lost: LostRankError | None = None
        self._has_ended_connection = threading.Event()
        self._has_lost = threading.Event()
        self._has_verdict = False
        self._closed = threading.Event()
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._watch, args=(list(ends),), name="device-watch", daemon=True)
        failure_detector.on_verdict = self._note_verdict
        self._thread.start()

    def supervise(self, work: Callable[[], T], timeout: float | None = None) -> T:
        """As in Ranks. Work within supervised work belongs to it."""
        if self._work is not None:
            return work()
        if self._lost is not None:  # The work would wait for the device, which may never do it.
            raise self._lost
        now = time.monotonic()
        self._work = (now, now + (self._timeout if timeout is None else timeout))
        try:
            result = work()
        except Exception as error:
            if isinstance(error, _DEVICE_ERROR) and self._has_ended_connection.wait(_GRACE):
                self._has_lost.wait(_VERDICT)  # The memory of the lost rank may be the cause of the device's error.
            if self._lost is not None:
                raise self._lost from error
            raise
        finally:
            self._work = None
        if self._lost is not None:  # The result is that of an aborted device.
            raise self._lost
        return result

    def wait_until(self, has_occurred: Callable[[], bool]) -> None:
        """Wait, within supervised work, for an event of the device that may never occur. Raises LostRankError once a
        rank is lost.
        """
        while not has_occurred():
            if self._lost is not None:
                raise self._lost
            time.sleep(_EVENT_PERIOD)

    @property
    def has_aborted(self) -> bool:
        """Whether the device's work has been aborted."""
        return self._lost is not None

    def abort_for(self, lost: LostRankError) -> None:
        """Abort the device's work, which waits for the ranks that this error names; once, and without waiting."""
        if self._lost is None:
            self._lost = lost
            self._has_lost.set()
            limit_exit()
            # In a thread, because it may not end.
            threading.Thread(target=self._try_abort, name="device-abort", daemon=True).start()

    def close(self) -> None:
        """Stop."""
        self._failure_detector.on_verdict = None
        self._closed.set()
        os.eventfd_write(self._wake, 1)
        if self._lost is None:  # Otherwise the thread may be about to call ``act``.
            self._thread.join()
            os.close(self._wake)

    def _note_verdict(self) -> None:
        self._has_verdict = True
        os.eventfd_write(self._wake, 1)

    def _watch(self, ends: list[socket.socket]) -> None:
        cause = self._first_failure(ends)
        if cause is None:
            return
        lost = self._failure_detector.lost(self._failure_detector.doing, cause)
        self.abort_for(lost)
        if self._closed.wait(_LAST_GRACE):
            return
        if self.act is not None:
            self.act(lost)
        elif self._work is not None:
            logger.critical("%s; this process ends, because it would wait for its device for ever", lost)
            os._exit(1)

    def _first_failure(self, ends: list[socket.socket]) -> OSError | None:
        """Waits for it; None once this object is closed."""
        poll, ended = select.poll(), None
        poll.register(self._wake, select.POLLIN)
        for end in ends:
            poll.register(end.fileno(), select.POLLRDHUP)
        while True:
            for descriptor, _ in poll.poll(1000 * (_PERIOD if ended is None else _SHORT_PERIOD)):
                if descriptor != self._wake:
                    poll.unregister(descriptor)
                    ended = ConnectionResetError("a connection was closed while the device computed")
                    self._has_ended_connection.set()
            if self._closed.is_set():
                return None
            if self._has_verdict:
                return ConnectionResetError("another rank has noticed it")
            work, now = self._work, time.monotonic()
            if work is None:
                continue
            began, limit = work
            if ended is not None and now > began + _GRACE:
                return ended
            if now > limit:
                return TimeoutError(f"timed out after {now - began:.0f} s")

    def _try_abort(self) -> None:
        try:
            self._abort()
        except Exception:
            logger.exception("the work of the device was not aborted")
