"""A real launcher as a process, with its own loopback address."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai.resources  # noqa: F401 - modules that import each other: two threads that begin with them deadlock
from openai import OpenAI
from runtime_support.processes import children_of, is_alive
from suite_support.worker import free_host

PROGRAM = (sys.executable, "-m", "megatron_runtime.cli")
PORTS = (8000, 9000, 9001, 5557, 29500)
TOKEN = "control-token-of-the-tests"
KEY = "coordinator-key-of-the-tests-0123456789"
MODEL = "chat"
READY_SECONDS = 90.0
SHORTEST_POLL, LONGEST_POLL = 0.03, 0.3
"""Seconds between two questions for a state that has not changed."""

Answer = TypeVar("Answer")


def _client(**options: Any) -> httpx.Client:
    # Reading the certificates of authorities, which http does not need, takes 20 ms of each client.
    return httpx.Client(timeout=60, trust_env=False, verify=False, **options)


class Pod:
    """One launcher process, with clients of its endpoints. ``program`` has the words before the flags."""

    def __init__(self, folder: Path, *flags: str, program: Sequence[str] = PROGRAM, **environment: str) -> None:
        self.host = environment.get("MEGATRON_BIND_HOST") or free_host(PORTS)
        self.key = KEY
        self.termination_log = folder / "termination.json"
        self.log = folder / "log.txt"
        identity = {
            "MEGATRON_BIND_HOST": self.host,
            "MEGATRON_CONTROL_TOKEN": TOKEN,
            "MEGATRON_COORDINATOR_KEY": KEY,
            "MEGATRON_TERMINATION_LOG": str(self.termination_log),
            "OMP_NUM_THREADS": "1",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*program, "--served-name", MODEL, "--threads-per-rank", "1", *flags],
                env={**os.environ, **identity, **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.control = _client(base_url=f"http://{self.host}:9000", headers={"Authorization": f"Bearer {TOKEN}"})
        self.http = _client(base_url=f"http://{self.host}:8000")
        self.openai = OpenAI(base_url=self.url, api_key="none", max_retries=0, http_client=_client())

    def state(self, **query: float) -> dict[str, Any]:
        """The state that the control API reports."""
        body: dict[str, Any] = self.control.get("/v1/state", params=query).json()
        return body

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        """A request to the frontend for the served model."""
        return self.http.post(path, json={"model": MODEL, **body}, headers=headers)

    def signal(self, name: str) -> httpx.Response:
        """Sends a lifecycle signal and waits until it is carried out."""
        return self.control.post(f"/v1/{name}", params={"wait": "true", "timeout": 30})

    def wait_for(self, what: Callable[[dict[str, Any]], bool], seconds: float = READY_SECONDS) -> dict[str, Any]:
        """Waits for a state that fulfils the condition, and returns it.

        A change of the state's revision is seen at once; everything else that the condition may ask for, and loads of
        replica groups, after ``LONGEST_POLL`` at the latest.
        """
        deadline = time.monotonic() + seconds
        query: dict[str, float] = {}
        poll = SHORTEST_POLL
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the launcher ended with {self.process.returncode}:\n{self.words()}")
            try:
                if what(state := self.state(**query)):
                    return state
                query = {"after": state["revision"], "timeout": poll}
            except httpx.TransportError:
                query = {}
                time.sleep(poll)
            poll = min(1.5 * poll, LONGEST_POLL)
        raise AssertionError(f"not within {seconds} s; end of the log:\n{self.words()}")

    def begin(self, pool: Executor, requests: Sequence[Callable[[], Answer]]) -> list[Future[Answer]]:
        """Starts requests while the engines are paused, so that none is finished before the last one has arrived."""
        self.signal("pause")
        answers = [pool.submit(request) for request in requests]
        self.wait_for(lambda state: state["requests"]["waiting"] == len(requests))
        self.signal("unpause")
        return answers

    def begin_streams(self, pool: Executor, streams: Sequence[Callable[[], Iterator[str]]]) -> list[Future[str]]:
        """Starts streams together, and returns once each has delivered text. The results are the whole texts.

        The numbers of requests in the state are up to 1 s old, in which small models end long requests.
        """
        begun = [threading.Event() for _ in streams]

        def read(stream: Callable[[], Iterator[str]], has_begun: threading.Event) -> str:
            text = ""
            for part in stream():
                text += part
                if text:
                    has_begun.set()
            return text

        answers = self.begin(pool, [partial(read, *one) for one in zip(streams, begun, strict=True)])
        for answer, has_begun in zip(answers, begun, strict=True):
            while not has_begun.wait(0.05) and not answer.done():
                pass
        return answers

    @staticmethod
    def together(*requests: Callable[[], Answer]) -> list[Answer]:
        """The results of requests that are sent at the same time.

        A step of the engine with many requests takes little longer than with one, because it reads the weights once.
        """
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda request: request(), requests))

    def wait_ready(self) -> Pod:
        """Returns once the pod is ready."""
        self.wait_for(lambda state: state["ready"])
        return self

    def words(self) -> str:
        """The end of the log."""
        return self.log.read_text()[-4000:]

    def children(self) -> dict[int, str]:
        """The processes of the launcher, with their command lines."""
        return children_of(self.process.pid)

    def processes(self, word: str) -> list[int]:
        """The processes of the launcher whose command line has ``word``."""
        return [pid for pid, command in self.children().items() if word in command]

    def child(self, word: str) -> int:
        """The first of these processes."""
        return min(self.processes(word))

    def launchers(self) -> list[int]:
        """The launcher."""
        return [self.process.pid]

    @property
    def url(self) -> str:
        """Base URL of the OpenAI endpoint."""
        return f"http://{self.host}:8000/v1"

    @property
    def coordinator(self) -> str:
        """Address of the coordinator."""
        return f"tcp://{self.host}:5557"

    def end(self) -> None:
        """Kills the launcher, and returns its remaining processes."""
        below = list(self.children()) if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        self.control.close()
        self.http.close()
        self.openai.close()
        wait_until(lambda: not any(is_alive(pid) for pid in below), "processes are left over")


def wait_until(condition: Callable[[], bool], otherwise: str, seconds: float = 20.0) -> None:
    """Polls until ``condition`` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)
