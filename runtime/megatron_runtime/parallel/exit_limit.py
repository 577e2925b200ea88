"""Ends a process whose exit would wait for a device that never ends its work."""

from __future__ import annotations

import atexit
import signal

EXIT_SECONDS = 10.0
"""Time for the exit itself, from when the interpreter has begun it."""


def limit_exit() -> None:
    """Let SIGALRM end this process if its exit takes longer than ``EXIT_SECONDS``; to be called once.

    At exit, libraries free memory of the device, which waits for all of its work. No thread of Python runs then, but a
    timer of the kernel does.
    """
    atexit.register(_begin)


def _begin() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, EXIT_SECONDS)
