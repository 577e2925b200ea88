"""Notices that a host or the network to it is gone, whatever a rank is at."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Iterable

_GRACE = 5.0
"""Seconds that the rank itself has to notice, which then ends in better order."""
_LAST_WORDS = 20.0
"""The same while there is something left to read, which may be that this is the end."""


class LinkWatch:
    """Waits, without using the processor, for an error of a connection; see `connections.break_when_silent`.

    A rank that has sent and now waits for another one, in a collective of torch's say, hears nothing of a broken
    connection before the collective's timeout.

    Args:
        ends: The connections; they belong to others, who close them after this.
        act: Called in this thread when one has failed and the rank hasn't noticed by itself, with the error.
    """

    def __init__(self, ends: Iterable[socket.socket], act: Callable[[OSError], None]) -> None:
        self._ends = {end.fileno(): end for end in ends}
        self._act = act
        self._stopped = threading.Event()
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._watch, name="link-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no longer."""
        self._stopped.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for descriptor in self._ends:
            poll.register(descriptor, 0)  # errors alone, which are always told
        failed = [self._ends[found] for found, _ in poll.poll() if found != self._wake]
        if failed and not self._stopped.wait(_GRACE):
            unread, error = _look(failed[0])
            if not unread or not self._stopped.wait(_LAST_WORDS):
                self._act(error)


def _look(end: socket.socket) -> tuple[bool, OSError]:
    """Whether there is something left to read, and what is wrong."""
    try:
        unread = bool(end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError as error:
        return False, error
    return unread, ConnectionResetError("the connection was closed")
