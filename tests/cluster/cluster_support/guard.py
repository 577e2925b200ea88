"""Runs one command, and kills it with all its children when the process that started the guard ends.

Usage: `guard.py COMMAND [ARGUMENT...]` in a new session, with a pipe as standard input. The starter keeps the other end
of the pipe open: the kernel closes it when the starter ends, even by SIGKILL, and the guard then kills its process
group. SIGTERM is forwarded to the command. The exit status is the command's, as in a shell.
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
    """A hook for the forked child that ends it with the guard; None if the kernel does not support that."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # loaded before the fork: a forked child must not allocate much
    return lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_for_end_of_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass


def main(command: list[str]) -> int:
    if os.getpgrp() != os.getpid():
        sys.exit("guard.py kills its process group: start it in a new session")
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
        os.killpg(0, signal.SIGKILL)  # last, because a guard that ends earlier would not reap its child
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
