"""Runs a command that dies with its parent: ``python die_with_parent.py PARENT_PID COMMAND [ARGUMENT...]``.

The kernel kills the command when the thread that started it ends, even by SIGKILL. This is a program instead of a hook
between fork and exec, because such a hook is unsafe in a process with threads. It uses the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
CANNOT_EXECUTE = 126


def main(parent: int, command: list[str]) -> int:
    """Replaces this process by the command. Returns an exit status only on failure."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        print(f"die_with_parent: prctl failed: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
        return CANNOT_EXECUTE
    if os.getppid() != parent:  # the parent ended before the prctl call
        return CANNOT_EXECUTE
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"die_with_parent: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return CANNOT_EXECUTE


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
