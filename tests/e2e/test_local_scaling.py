"""Replica groups are added and removed while requests are answered."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

CLIENTS = 4
PAUSE_SECONDS = 0.5
"""Between two requests of a client: without it, the clients take the processor from the pods that start."""
QUESTION: Any = [{"role": "user", "content": "Count from one to fifty in words."}]


class Load:
    """Clients that send requests continuously and never retry; records answers and errors."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self.answers: list[str] = []
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._ask_on, args=(place,)) for place in range(CLIENTS)]

    def start(self) -> None:
        """Starts all clients."""
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Waits for the remaining answers."""
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _ask_on(self, place: int) -> None:
        http = openai.DefaultHttpxClient(trust_env=False)
        with openai.OpenAI(base_url=self._url, api_key="none", timeout=100, max_retries=0, http_client=http) as api:
            for turn in itertools.count(place):
                if self._ending.wait(PAUSE_SECONDS):
                    return
                self._ask(api, is_streamed=bool(turn % 2))

    def _ask(self, api: openai.OpenAI, *, is_streamed: bool) -> None:
        asked: Any = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 100}
        try:
            if is_streamed:
                chunks = list(api.chat.completions.create(**asked, stream=True))
                answer = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
            else:
                answer = api.chat.completions.create(**asked).choices[0].message.content
        except openai.OpenAIError as error:
            with self._lock:
                self.failures.append(repr(error))
            return
        with self._lock:
            self.answers.append(answer)


@contextmanager
def load_on(url: str) -> Iterator[Load]:
    load = Load(url)
    load.start()
    try:
        yield load
    finally:
        load.end()


def generated_by_group(command: Any, http: httpx.Client) -> dict[str, int]:
    """Generated tokens of each replica group, from the leader's metrics."""
    leader = re.findall(r"pod smollm2-0-\d+-0: \S+ at (127\.[\d.]+)", command.text)[-1]
    text = http.get(f"http://{leader}:9001/metrics").text
    return {
        group: int(float(count))
        for group, count in re.findall(r'replica_group_generation_tokens_total\{replica_group="(\d+)"\} (\S+)', text)
    }


@pytest.mark.parametrize("pods", [1, 2])
def test_new_replica_groups_get_requests_and_removed_ones_lose_none(
    start_tiny: Callable[..., Any], wait_until: Callable[..., Any], pods: int
) -> None:
    command = start_tiny(
        replicas=1,
        engine={"kvCacheMemory": "32Mi"},
        parallelism={"pipeline": pods},
        routing={"policy": "LoadBalanced"},
    )
    command.wait_for("ready replicas: 1/1")
    with httpx.Client(trust_env=False) as http, load_on(command.url) as load:
        wait_until(lambda: len(load.answers) >= CLIENTS, "answers of one copy")
        command.wait_for("ready replicas: 2/2", after=command.edit(replicas=2))
        wait_until(lambda: generated_by_group(command, http).get("1", 0) > 0, "requests at the copy that came")
        after = command.edit(replicas=1)
        for pod in range(pods):
            command.wait_for(rf"pod smollm2-1-0-{pod}: gone", after=after)
        before = len(load.answers)
        wait_until(lambda: len(load.answers) >= before + CLIENTS, "answers of the copy that stayed")
    assert load.failures == [], command.text
    assert len(set(load.answers)) == 1
    assert "GroupFailed" not in command.text
