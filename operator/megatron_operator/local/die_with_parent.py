"""Runs one command that cannot outlive its starter: ``python die_with_parent.py PARENT_PID COMMAND [ARGUMENT...]``.

The kernel kills the command when the thread that started it ends, SIGKILL included. A program of its own instead of a
hook between fork and exec, because such a hook is unsafe where the starter has threads. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
CANNOT_EXECUTE = 126


def main(parent: int, command: list[str]) -> int:
    """Never returns when all goes well: the command takes this process's place. Returns an exit status otherwise."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        print(f"leash: prctl failed: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
        return CANNOT_EXECUTE
    if os.getppid() != parent:  # it ended before the kernel was asked
        return CANNOT_EXECUTE
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"leash: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return CANNOT_EXECUTE


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
