"""Runs a machine within the machine: namespaces and cgroups that end with the process that started it.

Usage: `machine.py SCRATCH COMMAND...` as root, in a new session, with a pipe as standard input. COMMAND becomes the
first process of a new PID namespace, with separate mounts, network, host name and cgroups. When it ends, or the other
end of the pipe is closed (by the kernel when the starter ends, even by SIGKILL), the kernel kills all processes in the
PID namespace, which also removes mounts and network; this program removes cgroups and SCRATCH. The next start removes
cgroups that a killed instance left. Uses only the standard library.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "megatron-node-"
PR_SET_PDEATHSIG = 1
UNSHARED = ("--cgroup", "--ipc", "--mount", "--net", "--pid", "--uts")
SECONDS_TO_DIE = 20.0


def hierarchies() -> Iterator[Path]:
    """The mount points of the cgroup hierarchies."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith(("cgroup ", "cgroup2 ")):
            yield Path(before.split()[4])


def make_cgroups(name: str) -> list[Path]:
    """Creates a cgroup with this name in each hierarchy."""
    made = []
    for hierarchy in hierarchies():
        folder = hierarchy / name
        folder.mkdir()
        made.append(folder)
        # A new cpuset is empty until it is configured.
        for setting in ("cpuset.cpus", "cpuset.mems"):
            if (hierarchy / setting).exists():
                (folder / setting).write_text((hierarchy / setting).read_text())
    return made


def remove_cgroup(folder: Path) -> None:
    """Removes it with all cgroups below; OSError while a process is in one of them."""
    for below, _, _ in os.walk(folder, topdown=False):
        Path(below).rmdir()


def remove_forgotten() -> None:
    """Removes cgroups of ended instances, whose process ids are in the names."""
    for hierarchy in hierarchies():
        for folder in hierarchy.glob(f"{PREFIX}*"):
            if not Path("/proc", folder.name.rpartition("-")[2]).exists():
                with contextlib.suppress(OSError):
                    remove_cgroup(folder)


def remove_soon(folders: list[Path]) -> None:
    """Removes them once their processes have ended."""
    deadline = time.monotonic() + SECONDS_TO_DIE
    for folder in folders:
        while folder.exists():
            try:
                remove_cgroup(folder)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def start(command: list[str], cgroups: list[Path]) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None)  # loaded before the fork: a forked child must not allocate much

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for folder in cgroups:
            (folder / "cgroup.procs").write_text("0")

    unshare = ["unshare", *UNSHARED, "--fork", "--kill-child", "--mount-proc", "--propagation=private"]
    return subprocess.Popen([*unshare, *command], stdin=subprocess.DEVNULL, preexec_fn=prepare)


def main(scratch: Path, command: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    remove_forgotten()
    cgroups = make_cgroups(f"{PREFIX}{os.getpid()}")
    try:
        first = start(command, cgroups)

        def kill_when_abandoned() -> None:
            while os.read(sys.stdin.fileno(), 4096):
                pass
            first.kill()

        threading.Thread(target=kill_when_abandoned, daemon=True).start()
        return abs(first.wait())
    finally:
        remove_soon(cgroups)
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
