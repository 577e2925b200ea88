"""A contender as a process with its own Python: the client side of the protocols."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from peers.protocol import Job

MODULES = Path(__file__).parent.parent
LAST_LINES = 12
TIMEOUT_SECONDS = 20


class ContenderError(Exception):
    """A contender ended before it answered, or its answer is wrong."""


class StoppedProcess:
    """A process that answers one JSON object per line. Between requests it is stopped, with all its children."""

    def __init__(self, name: str, python: str, module: str, log: Path, environment: Mapping[str, str]) -> None:
        """``python`` runs ``module`` of this folder's parent; stderr is written to ``log``."""
        self.name, self.python = name, python
        self._module, self._log, self._environment = module, log, environment

    def __enter__(self) -> Self:
        path = [str(MODULES)]
        if self.python == sys.executable and "PYTHONPATH" in os.environ:
            path.append(os.environ["PYTHONPATH"])
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [self.python, "-P", "-m", self._module],
                env={**os.environ, **self._environment, "PYTHONPATH": os.pathsep.join(path)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                process_group=0,
            )
        try:
            self._load()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _load(self) -> None:
        """Sends the first request."""

    def _ask(self, what: str, **values: object) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        self._signal(signal.SIGCONT)
        try:
            print(json.dumps({"do": what, **values}, default=str), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            words = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
            raise ContenderError("\n    ".join([f"{self.name} ended during {what!r}; the end of its log:", *words]))
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def _end(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # the last request was not written completely
            self._process.stdin.close()
        try:
            self._process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()


class ContenderProcess(StoppedProcess):
    """Loads the job's model when entered, and computes only during requests."""

    def __init__(self, name: str, python: str, job: Job) -> None:
        """``name`` is the name of a peer's file with hyphens for underscores; ``python`` runs it."""
        environment = {"OMP_NUM_THREADS": str(job.threads), "HF_HUB_OFFLINE": "1"}
        super().__init__(name, python, f"peers.{name.replace('-', '_')}", job.work.with_suffix(".log"), environment)
        self.job = job
        self.versions: dict[str, str] = {}

    def _load(self) -> None:
        self.job.work.mkdir(parents=True)
        self.versions = self._ask("load", **asdict(self.job))["versions"]

    def run(self) -> tuple[float, list[list[int]]]:
        """The seconds of the job, and the new tokens of each prompt.

        Raises:
            ContenderError: It ended, or a prompt has a wrong number of new tokens.
        """
        answer = self._ask("run", new_tokens=self.job.new_tokens)
        counts = [len(tokens) for tokens in answer["tokens"]]
        if counts != [self.job.new_tokens] * len(self.job.prompts):
            raise ContenderError(
                f"{self.name} generated {counts} new tokens instead of {self.job.new_tokens} per prompt"
            )
        return answer["seconds"], answer["tokens"]
