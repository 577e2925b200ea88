"""A server as a process: from its exec to its first answer."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from peers.process import LAST_LINES, ContenderError

CONTROL_TOKEN = "of-the-benchmark"
HOST = "127.0.0.1"
MODEL = "model"
PROMPT = "The capital of France is"
POLL_SECONDS = 0.01
TIMEOUT_SECONDS = 600.0
GRACE_SECONDS = 30.0

Command = Callable[[str, Path, int, int], list[str]]
"""Returns the command line for a Python, a checkpoint, a port and a number of threads."""


@dataclass(frozen=True, eq=False)
class Server:
    """How a server is started."""

    name: str
    python: str
    command: Command
    checkpoint: Path
    packages: tuple[str, ...]
    """Distributions whose versions affect the results."""
    environment: dict[str, str] = field(default_factory=dict)

    def versions(self) -> dict[str, str]:
        """The versions of the packages in the server's environment.

        Raises:
            ContenderError: One is missing.
        """
        words = "import importlib.metadata as m, json, sys; print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
        done = subprocess.run([self.python, "-c", words, *self.packages], capture_output=True, text=True)
        if done.returncode:
            raise ContenderError(f"{self.name}: {done.stderr.strip().splitlines()[-1]}")
        found: dict[str, str] = json.loads(done.stdout)
        return found


class Start:
    """One start of a server: a context of the main thread that executes the program and ends it, also on SIGTERM."""

    def __init__(self, server: Server, threads: int, log: Path) -> None:
        self.server, self.port = server, free_port()
        self._threads, self._log = threads, log

    def __enter__(self) -> Start:
        command = self.server.command(self.server.python, self.server.checkpoint, self.port, self._threads)
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads), **self.server.environment}
        self._handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
        with self._log.open("w") as log:
            self.began = time.monotonic()
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, process_group=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        signal.signal(signal.SIGTERM, self._handler)

    @property
    def pid(self) -> int:
        return self._process.pid

    def seconds_until(self, has_happened: Callable[[], bool], limit: float = TIMEOUT_SECONDS) -> float:
        """Seconds from the exec until a condition holds, at most ``limit``.

        Raises:
            ContenderError: The server ended or took too long; the message has the end of its log.
        """
        while not has_happened():
            seconds = time.monotonic() - self.began
            if self._process.poll() is not None or seconds > limit:
                words = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
                raise ContenderError("\n    ".join([f"{self.server.name} did not answer; the end of its log:", *words]))
            time.sleep(POLL_SECONDS)
        return time.monotonic() - self.began

    def exit_code(self, limit: float) -> int:
        """Of a server that ends by itself. Raises TimeoutExpired if it still runs after ``limit`` seconds."""
        return self._process.wait(limit)

    def answers(self) -> bool:
        """Whether the server answers a completion of one token."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
        return self.status("POST", "/v1/completions", json.dumps(body)) == 200

    @property
    def control_port(self) -> int:
        """The port of our control API, which our server's log has."""
        return int(re.findall(r"control API on http://.*:(\d+)", self.log())[-1])

    def status(self, method: str, path: str, body: str | None = None) -> int | None:
        """The status of the response; None while the server does not answer."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=TIMEOUT_SECONDS)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            return answer.status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def log(self) -> str:
        """The log of the server so far."""
        return self._log.read_text(errors="replace")


def free_port() -> int:
    """A free port of this machine."""
    with socket.create_server((HOST, 0)) as taken:
        return int(taken.getsockname()[1])


def ours(python: str, checkpoint: Path, port: int, threads: int, **further: object) -> list[str]:
    """``megatron-serve``."""
    options = {"model": checkpoint, "served-name": MODEL, "device": "cpu", "host": HOST, "port": port}
    options |= {"threads-per-rank": threads, "control-port": 0, "metrics-port": 0, "coordinator-port": 0}
    return [python, "-m", "megatron_runtime.cli", *_flags(options | further)]


def llama_cpp(python: str, checkpoint: Path, port: int, threads: int) -> list[str]:
    """The server of llama-cpp-python."""
    options = {"model": checkpoint, "model_alias": MODEL, "host": HOST, "port": port}
    return [python, "-m", "llama_cpp.server", *_flags(options | {"n_threads": threads, "n_threads_batch": threads})]


def vllm(python: str, checkpoint: Path, port: int, _: int, **further: object) -> list[str]:
    """vLLM's server."""
    options = {"model": checkpoint, "served-model-name": MODEL, "host": HOST, "port": port}
    return [python, "-m", "vllm.entrypoints.openai.api_server", *_flags(options | further)]


def our_server(checkpoint: Path, environment: dict[str, str], **options: object) -> Server:
    """Ours, with further options of the command line; True for a switch."""
    environment = {"MEGATRON_CONTROL_TOKEN": CONTROL_TOKEN, **environment}
    return Server("ours", sys.executable, partial(ours, **options), checkpoint, ("torch", "numba"), environment)


def vllm_server(python: str, checkpoint: Path, environment: dict[str, str], **options: object) -> Server:
    """vLLM's, offline, with further options as in `our_server`; its KV cache has 1 GiB by default."""
    defaults = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment = defaults | environment
    return Server("vllm", python, partial(vllm, **options), checkpoint, ("vllm-cpu", "torch"), environment)


def _flags(options: dict[str, object]) -> list[str]:
    words = [[f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in options.items()]
    return [word for option in words for word in option]
