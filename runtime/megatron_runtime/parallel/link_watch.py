"""Detects an unreachable host during any operation of a rank."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Iterable

_GRACE = 5.0
"""Seconds within which the rank itself may detect the error, which gives a better shutdown."""
_LAST_WORDS = 20.0
"""The same while there is unread data, which may be the message of an orderly end."""


class LinkWatch:
    """Waits, without using the processor, for an error of a connection; see `connections.break_when_silent`.

    A rank that waits for another one in a torch collective detects a broken connection only at the collective's
    timeout.

    Args:
        ends: The connections. Their owners close them after this object.
        act: Called with the error, in this thread, when a connection has failed and the rank has not detected it.
    """

    def __init__(self, ends: Iterable[socket.socket], act: Callable[[OSError], None]) -> None:
        self._ends = {end.fileno(): end for end in ends}
        self._act = act
        self._stopped = threading.Event()
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._watch, name="link-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._stopped.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for descriptor in self._ends:
            poll.register(descriptor, 0)  # Errors alone, which poll() always reports.
        failed = [self._ends[found] for found, _ in poll.poll() if found != self._wake]
        if failed and not self._stopped.wait(_GRACE):
            unread, error = _look(failed[0])
            if not unread or not self._stopped.wait(_LAST_WORDS):
                self._act(error)


def _look(end: socket.socket) -> tuple[bool, OSError]:
    """Whether there is unread data, and the error."""
    try:
        unread = bool(end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError as error:
        return False, error
    return unread, ConnectionResetError("the connection was closed")
