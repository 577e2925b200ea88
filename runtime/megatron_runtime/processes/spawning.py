"""How a child process starts: as a new interpreter, or forked by a `ForkServer`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from typing import Any, Protocol

PRIVATE_VARIABLES = frozenset({"MEGATRON_CONTROL_TOKEN"})
"""Variables of the launcher's environment that no child has."""


@dataclass(frozen=True)
class Command:
    """What a process runs: ``main()`` of a module, with options as JSON.

    Attributes:
        descriptors: File descriptors of this process that the new one inherits, by the names of the options that have
            their numbers.
        environment: Changes to the environment.
        output: File descriptor of its standard output and standard error.
    """

    module: str
    options: Mapping[str, Any]
    descriptors: Mapping[str, int]
    environment: Mapping[str, str]
    stdin: int
    output: int


class ChildProcess(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int:
        """Its id, which no other process gets before ``wait`` has returned."""

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""

    async def wait(self) -> int:
        """Wait for the end. Returns the exit code."""

    def send_signal(self, number: int, /) -> None:
        """Send a signal. Raises ProcessLookupError if the process has ended."""


class Spawner(Protocol):
    """Starts processes. Each leads its own process group, and is a child of this process."""

    def start(self) -> None:
        """Prepare for processes; `spawn` does so too."""

    async def spawn(self, command: Command) -> ChildProcess:
        """Start a process. Raises OSError if that fails."""

    async def close(self) -> None:
        """Give up processes that are about to start; others continue. Idempotent."""


class Interpreters:
    """Starts each process as ``python -m module``."""

    def start(self) -> None:
        """Nothing to prepare."""

    async def spawn(self, command: Command) -> ChildProcess:
        """Start a process. Raises OSError if that fails."""
        inherited = {name: value for name, value in os.environ.items() if name not in PRIVATE_VARIABLES}
        return await asyncio.create_subprocess_exec(
            *command_line(command.module, {**command.options, **command.descriptors}),
            stdin=command.stdin,
            stdout=command.output,
            stderr=command.output,
            env={**inherited, **command.environment},
            pass_fds=tuple(command.descriptors.values()),
            process_group=0,
        )

    async def close(self) -> None:
        """Processes start at once."""


INTERPRETERS = Interpreters()


def command_line(module: str, options: Mapping[str, Any]) -> list[str]:
    """The command line of a process; of a forked one, what other programs show."""
    return [sys.executable, "-u", "-m", module, json.dumps(dict(options))]


def pipe() -> tuple[FileIO, FileIO]:
    """The ends of a pipe: for reading, and for writing. Neither is inherited."""
    read, write = os.pipe()
    return FileIO(read, "rb"), FileIO(write, "wb")
