"""The leader pod is killed, hangs, or is paused, while official clients send requests with default settings."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from suite_support.local_command import told_by_kernel

from megatron_operator.local.processes import descendants

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]

CLIENTS = 4
QUESTION: Any = [{"role": "user", "content": "Count from one to fifty in words."}]
MOVED = r"LeaderMoved: smollm2-(\d)-\d+-0 is the leader"


def client_of(url: str, **headers: str) -> openai.OpenAI:
    """A client with its default retries."""
    http = httpx.Client(trust_env=False)
    return openai.OpenAI(base_url=url, api_key="none", timeout=100, http_client=http, default_headers=headers)


def ask(client: openai.OpenAI) -> str:
    """An answer that takes about a second."""
    asked = {"temperature": 0, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(model="smollm2", messages=QUESTION, **asked)
    return answer.choices[0].message.content or ""


class Load:
    """Clients that send requests continuously; records the begin and end of each."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ending = threading.Event()
        self.answers: list[tuple[float, float, str]] = []
        self.failures: list[str] = []

    def run(self) -> None:
        """Runs one client until the end."""
        with client_of(self._url) as client:
            while not self._ending.is_set():
                begun = time.monotonic()
                try:
                    text = ask(client)
                except openai.OpenAIError as error:
                    self.failures.append(repr(error))
                else:
                    self.answers.append((begun, time.monotonic(), text))

    def end(self) -> None:
        """Ends the clients."""
        self._ending.set()

    def begun_after(self, moment: float) -> list[float]:
        """The end times of the requests that began after this time."""
        return [there for begun, there, _ in self.answers if begun > moment]


@contextmanager
def load_on(url: str) -> Iterator[Load]:
    load = Load(url)
    threads = [threading.Thread(target=load.run) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.end()
        for thread in threads:
            thread.join()


def processes_of(command: Any, group: int) -> list[int]:
    """The processes of the pod of a replica group."""
    wanted = f"MEGATRON_REPLICA_GROUP={group}".encode()
    return [
        process.pid
        for process in descendants(command.process.pid)
        if wanted in told_by_kernel(process.pid, "environ").split(b"\0")
    ]


def signal_pod(command: Any, group: int, number: signal.Signals) -> float:
    """Sends a signal to all processes of a replica group's pod; returns the time."""
    for pid in processes_of(command, group):
        os.kill(pid, number)
    return time.monotonic()


def coordinators(command: Any) -> list[bool]:
    """Whether each replica group's pod runs a coordinator."""
    return [
        any(b"coordinator_process" in told_by_kernel(pid, "cmdline") for pid in processes_of(command, group))
        for group in range(2)
    ]


def test_clients_see_only_a_delay_when_the_leader_pod_is_killed_and_the_lifecycle_is_kept(
    start_tiny: Callable[..., Any], wait_until: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    command = start_tiny(replicas=2)
    command.wait_for("ready replicas: 2/2")
    with load_on(command.url) as load:
        wait_until(lambda: len(load.answers) >= CLIENTS, "answers before")
        killed = signal_pod(command, 0, signal.SIGKILL)
        wait_until(lambda: len(load.begun_after(killed)) >= 2 * CLIENTS, "answers after")
    assert re.search(MOVED, command.text)
    assert load.failures == []
    assert len({text for *_, text in load.answers}) == 1
    longest = max(there - begun for begun, there, _ in load.answers if there > killed)
    with capsys.disabled():
        first = min(load.begun_after(killed)) - killed
        print(f"\nleader killed: answered again after {first:.1f} s; the longest that anybody waited: {longest:.1f} s")
    moves = [place for place, line in enumerate(command.lines) if re.search(MOVED, line)]
    command.wait_for("ready replicas: 2/2", after=moves[0])
    assert coordinators(command) == [False, True]

    command.wait_for("Paused: the engine is paused", after=command.edit(lifecycle="Paused"))
    killed_at = len(command.lines)
    signal_pod(command, 1, signal.SIGKILL)
    command.wait_for(MOVED, after=killed_at)
    wait_until(lambda: coordinators(command)[0], "the coordinator")
    waiting: list[str] = []
    with client_of(command.url) as client:
        asking = threading.Thread(target=lambda: waiting.append(ask(client)))
        asking.start()
        command.wait_for("ready replicas: 2/2", after=killed_at)
        assert waiting == []
        command.edit(lifecycle="Running")
        asking.join(100)
    assert waiting == [load.answers[0][2]]


def test_a_leader_that_hung_is_no_longer_the_leader_when_it_recovers(
    start_tiny: Callable[..., Any], wait_until: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    command = start_tiny(replicas=2)
    command.wait_for("ready replicas: 2/2")
    # A connection to a stopped process hangs until the timeout of its client.
    with client_of(command.url, Connection="close") as client:
        expected = ask(client)
        stopped = signal_pod(command, 0, signal.SIGSTOP)
        command.wait_for(MOVED)
        assert ask(client) == expected
        with capsys.disabled():
            print(f"\nleader stood still: answered again after {time.monotonic() - stopped:.1f} s")
        signal_pod(command, 0, signal.SIGCONT)
        wait_until(lambda: coordinators(command) == [False, True], "the former leader to give up")
        assert {ask(client) for _ in range(4)} == {expected}
