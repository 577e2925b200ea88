"""`megatron-operator local` as a process, with a resource file and its output on a pipe."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from megatron_operator.local.processes import Process, descendants, is_alive

SAMPLE = Path(__file__).parents[2] / "manifests/samples/smollm2.yaml"
DEADLINE_SECONDS = 120


def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    """Polls the condition; fails with ``what``."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.05)
    return value


def told_by_kernel(pid: int, file: str) -> bytes:
    """A file in /proc of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


class LocalCommand:
    """The command with its own resource file. ``resource`` is the content of the file."""

    def __init__(self, file: Path, resource: dict[str, Any], command: Sequence[str | Path], **environment: str) -> None:
        self.file = file
        self.resource = resource
        self.write()
        self.lines: list[str] = []
        self.seen: set[Process] = set()
        self._looked = 0.0
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            start_new_session=True,  # the test sends signals
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @classmethod
    def of_sample(cls, folder: Path, models: Path | None, **changes: Any) -> Self:
        """The command with the sample and these changes."""
        file = folder / "resource.yaml"
        command = [sys.executable, "-m", "megatron_operator.cli", "local", "-f", file]
        command += ["--map-path", f"/models={models}"] if models else []
        return cls(file, sample(**changes), command, TMPDIR=str(folder))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def text(self) -> str:
        """The output so far."""
        return "\n".join(self.lines)

    @property
    def url(self) -> str:
        """Base URL of the OpenAI endpoint; waits until it is printed."""
        return str(self.wait_for(r"Available: \S+ answers at (\S+)")[1])

    def write(self) -> None:
        """Replaces the file as an editor does."""
        edited = self.file.with_suffix(".new")
        edited.write_text(yaml.safe_dump(self.resource, sort_keys=False))
        edited.replace(self.file)

    def edit(self, **changes: Any) -> int:
        """Changes fields of the spec; returns the index in ``lines`` of the output after it."""
        before = len(self.lines)
        self.resource["spec"].update(changes)
        self.write()
        return before

    def wait_for(self, pattern: str, after: int = 0) -> re.Match[str]:
        """The first line from ``after`` on that contains the pattern."""

        def found() -> re.Match[str] | None:
            self._look_at_processes()
            matches = (re.search(pattern, line) for line in list(self.lines[after:]))
            match = next((match for match in matches if match), None)
            assert match or self.process.poll() is None, f"ended without {pattern!r}:\n{self.text}"
            return match

        try:
            match = until(found, pattern)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text}") from None
        assert isinstance(match, re.Match)
        return match

    def _look_at_processes(self) -> None:
        """Rarely, because reading all of /proc at every poll took a sixth of a core."""
        if (now := time.monotonic()) - self._looked > 0.5:
            self._looked = now
            self.seen |= descendants(self.process.pid)

    def processes(self, word: str) -> list[int]:
        """Running processes of the pods whose command line has ``word``."""
        found = (process.pid for process in descendants(self.process.pid))
        return [pid for pid in found if word.encode() in told_by_kernel(pid, "cmdline")]

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal only to the command."""
        self.seen |= descendants(self.process.pid)
        self.process.send_signal(number)

    def exit_code(self) -> int:
        """Waits for the end, and for every line."""
        code = self.process.wait(DEADLINE_SECONDS)
        self._reader.join(DEADLINE_SECONDS)
        return code

    def left_over(self) -> set[Process]:
        """Processes of this run that still exist."""
        return {process for process in self.seen if is_alive(process)}

    def close(self) -> None:
        """Ends it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(DEADLINE_SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()


def sample(**changes: Any) -> dict[str, Any]:
    """The sample resource with changed fields of its spec; mappings are merged one level deep."""
    resource: dict[str, Any] = yaml.safe_load(SAMPLE.read_text())
    for name, value in changes.items():
        before = resource["spec"].get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        resource["spec"][name] = {**before, **value} if both else value  # type: ignore[dict-item]
    return resource
