"""Runs one command, and ends it with all its children when the starter of the guard is gone.

Usage: `guard.py COMMAND [ARGUMENT...]` in a session of its own, with a pipe as standard input. The starter keeps the
other end of the pipe open: the kernel closes it however the starter ends, SIGKILL included, and the end of input makes
the guard kill its process group. SIGTERM is handed on to the command. The exit status is the command's, as a shell
would give it.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def death_with_parent() -> Callable[[], None] | None:
    """A hook for the forked child that ends it with the guard; None where the kernel has no such thing."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # loaded before the fork: a freshly forked child must not allocate much
    return lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_for_end_of_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass


def main(command: list[str]) -> int:
    if os.getpgrp() != os.getpid():
        sys.exit("guard.py kills its process group: start it in a session of its own")
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=death_with_parent())
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    abandoned = threading.Event()

    def kill_when_abandoned() -> None:
        wait_for_end_of_input()
        abandoned.set()
        child.kill()

    threading.Thread(target=kill_when_abandoned, daemon=True).start()
    code = child.wait()
    if abandoned.is_set():
        os.killpg(0, signal.SIGKILL)  # only now: a guard that dies first leaves its child unreaped
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
