"""A replica group on two hosts whose network is cut and repaired."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from runtime_support.hosts import CannotMakeHosts, Host, Switch
from runtime_support.tiny_checkpoint import write_tiny_checkpoint

PROMPT = [5, 6, 7, 8, 9]
FLAGS = ("--dtype", "float32", "--kv-cache-memory", "8Mi", "--frontend-replicas", "1")
NOTICE_SECONDS = 50
"""Time within which both launchers end after a cut, on a busy machine; less than every collective's timeout."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def switch() -> Iterator[Switch]:
    try:
        made = Switch(2)
    except CannotMakeHosts as error:
        pytest.skip(str(error))
    yield made
    made.close()


def ask(pod: Any, length: int = 40) -> str:
    answer = pod.openai.completions.create(
        model="chat", prompt=PROMPT, temperature=0, max_tokens=length, extra_body={"ignore_eos": True}
    )
    return str(answer.choices[0].text)


@pytest.fixture
def start_attempt(switch: Switch, start_pod: Callable[..., Any], checkpoint: Path) -> Callable[[str, int], list[Any]]:
    """Starts one pod on each host, as an operator does; together they are one replica group."""

    def start(split: str, attempt: int) -> list[Any]:
        return [start_on(host, split, index, attempt) for index, host in enumerate(switch.hosts)]

    def start_on(host: Host, split: str, index: int, attempt: int) -> Any:
        first = switch.hosts[0].address
        with host:
            return start_pod(
                *("--model", str(checkpoint), *FLAGS, split, "2", "--ranks-per-pod", "1"),
                MEGATRON_BIND_HOST=host.address,
                MEGATRON_MASTER_ADDR=first,
                MEGATRON_COORDINATOR_ADDRESS=f"tcp://{first}:5557",
                MEGATRON_ATTEMPT=str(attempt),
                MEGATRON_POD_INDEX=str(index),
                MEGATRON_LEADER="0" if index else "1",
            )

    return start


def last_words(pod: Any) -> dict[str, Any]:
    reason: dict[str, Any] = json.loads(pod.termination_log.read_text())
    return reason


@pytest.mark.parametrize(("split", "requests"), [("--tensor-parallel", 0), ("--pipeline-parallel", 4)])
def test_a_cut_link_between_two_hosts_is_detected_by_both_and_the_next_attempt_serves_after_its_repair(
    switch: Switch, start_attempt: Callable[[str, int], list[Any]], split: str, requests: int
) -> None:
    here, there = switch.hosts
    before = start_attempt(split, 0)
    with here:
        before[0].wait_ready()
        whole = ask(before[0])
        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(ask, before[0], 500) for _ in range(requests)]
            switch.cut(there)
            assert [pod.process.wait(NOTICE_SECONDS) for pod in before] == [1, 1]
            assert all(answer.exception(NOTICE_SECONDS) for answer in asked)
    for pod, missing in zip(before, (1, 0), strict=True):
        reason = last_words(pod)
        assert (reason["reason"], reason["rank"]) == ("LostRank", missing), reason
        assert re.search(rf"rank {missing} \(tensor \d, stage \d\) is missing", reason["message"])
    switch.restore(there)
    after = start_attempt(split, 1)
    with here:
        after[0].wait_ready()
        assert ask(after[0]) == whole
