"""Processes that end with the tests, and commands."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cluster_support.errors import CommandFailedError

GUARD = Path(__file__).with_name("guard.py")
SECONDS_TO_DIE = 10.0


def tail(log: Path, lines: int = 20) -> str:
    """The last lines of a log, indented for an error message."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:])


class GuardedProcess:
    """A command under `guard.py`, in a new session, with its output in a log.

    The guard's process id is also the id of the process group. It is written beside the log, as `<log's stem>.pid`.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        log: Path,
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        guard: Path = GUARD,
    ) -> None:
        self.log = log
        self.pid_file = log.with_suffix(".pid")
        # -I and -S: the guard needs only the standard library, and starts in a third of the time.
        guarded = [sys.executable, "-I", "-S", str(guard), *map(str, command)]
        with log.open("ab") as output:
            self._guard = subprocess.Popen(
                guarded, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=cwd, env=env, start_new_session=True
            )
        self.pid_file.write_text(f"{self._guard.pid}\n")

    @property
    def pid(self) -> int:
        return self._guard.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._guard.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        return self._guard.wait(timeout)

    def stop(self, grace: float = 0.0) -> None:
        """Sends SIGTERM if there is a grace period (seconds), then SIGKILL to the group. May be called twice."""
        try:
            if grace and self.exit_code() is None:
                self._guard.terminate()
                self._wait_quietly(grace)
        finally:
            self._end()

    def _end(self) -> None:
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        if not self._wait_quietly(SECONDS_TO_DIE):
            os.killpg(self.pid, signal.SIGKILL)
            self._guard.wait()
        self.pid_file.unlink(missing_ok=True)

    def _wait_quietly(self, seconds: float) -> bool:
        try:
            self._guard.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def run_guarded(
    command: Sequence[str | Path],
    log: Path,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    every: float = 20.0,
    on_wait: Callable[[], None] = lambda: None,
) -> None:
    """Runs a command to its end, with periodic calls of `on_wait`. Raises CommandFailedError."""
    process = GuardedProcess(command, log, cwd=cwd, env=env)
    try:
        while True:
            try:
                code = process.wait(timeout=every)
                break
            except subprocess.TimeoutExpired:
                on_wait()
    finally:
        process.stop()
    if code != 0:
        shown = " ".join(map(str, command))[:300]
        raise CommandFailedError(f"exit status {code} from: {shown}\n{tail(log)}")
