"""A replica group over several pods: launchers with the environment that an operator sets."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from runtime_support.one_rank import answer_of_one_rank
from runtime_support.processes import is_alive
from runtime_support.tiny_checkpoint import write_tiny_checkpoint

PROMPT = [5, 6, 7, 8, 9]
FLAGS = ("--dtype", "float32", "--kv-cache-memory", "8Mi", "--frontend-replicas", "1", "--drain-timeout", "20")
LEAVE_SECONDS = 30
"""Time within which a replica group ends after the loss of a rank, on a busy machine."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def start_group(start_pod: Callable[..., Any], new_host: Callable[[], str], checkpoint: Path) -> Callable[..., Any]:
    """Starts the pods of one attempt of a replica group; the first pod of replica group 0 leads."""

    def start(
        *flags: str, pods: int = 2, group: int = 0, attempt: int = 0, leader: str | None = None, **environment: str
    ) -> list[Any]:
        hosts = [new_host() for _ in range(pods)]
        coordinator = leader or hosts[0]
        return [
            start_pod(
                *("--model", str(checkpoint), *FLAGS, *flags),
                **environment,
                MEGATRON_BIND_HOST=host,
                MEGATRON_MASTER_ADDR=hosts[0],
                MEGATRON_COORDINATOR_ADDRESS=f"tcp://{coordinator}:5557",
                MEGATRON_REPLICA_GROUP=str(group),
                MEGATRON_ATTEMPT=str(attempt),
                MEGATRON_POD_INDEX=str(index),
                MEGATRON_LEADER="1" if host == coordinator else "0",
            )
            for index, host in enumerate(hosts)
        ]

    return start


def ask(pod: Any, length: int = 40) -> str:
    answer = pod.openai.completions.create(
        model="chat", prompt=PROMPT, temperature=0, max_tokens=length, extra_body={"ignore_eos": True}
    )
    return str(answer.choices[0].text)


def long_answer(pod: Any) -> Callable[[], str]:
    """Sends requests that are unfinished while a test acts."""
    return partial(ask, pod, 300)


def rank_in(pod: Any) -> int:
    """Process id of the pod's first rank."""
    return int(pod.child("megatron_runtime.rank"))


def last_words(pod: Any) -> dict[str, Any]:
    """The termination log of a failed launcher."""
    reason: dict[str, Any] = json.loads(pod.termination_log.read_text())
    return reason


def test_pods_that_share_a_model_are_ready_together_and_answer_as_one(
    start_group: Callable[..., Any], checkpoint: Path
) -> None:
    whole = answer_of_one_rank(checkpoint, PROMPT, 40)
    first, second = start_group("--tensor-parallel", "2", "--pipeline-parallel", "2", "--ranks-per-pod", "3")
    first.wait_ready()
    second.wait_ready()
    assert [rank["rank"] for rank in first.state()["ranks"]] == [0, 1, 2]
    assert [rank["rank"] for rank in second.state()["ranks"]] == [3]
    assert ask(first) == whole
    assert first.signal("pause").json()["engineState"] == "PAUSED"
    assert first.signal("suspend").json()["engineState"] == "SUSPENDED"
    assert first.signal("resume").json()["engineState"] == "PAUSED"
    assert first.signal("unpause").json()["engineState"] == "RUNNING"
    assert ask(first) == whole


def test_no_pod_is_ready_before_all_ranks_have_joined_and_the_missing_one_is_named(
    start_group: Callable[..., Any],
) -> None:
    (alone,) = start_group("--tensor-parallel", "2", "--ranks-per-pod", "1", "--rendezvous-timeout", "6", pods=1)
    alone.wait_for(lambda state: state["ranks"] and state["ranks"][0]["phase"] == "Rendezvous")
    assert not alone.state()["ready"]
    assert alone.process.wait(30) == 1
    reason = last_words(alone)
    assert (reason["reason"], reason["rank"]) == ("LostRank", 1)
    assert "rank 1 did not join within 6 s" in reason["message"]


def test_a_killed_rank_ends_its_replica_group_in_all_pods_and_the_next_attempt_continues_its_requests(
    start_group: Callable[..., Any], start_pod: Callable[..., Any], checkpoint: Path
) -> None:
    leader = start_pod("--model", str(checkpoint), *FLAGS).wait_ready()
    whole = ask(leader, 300)

    def attempt(number: int) -> list[Any]:
        sizes = ("--tensor-parallel", "2", "--ranks-per-pod", "1")
        group: list[Any] = start_group(*sizes, group=1, attempt=number, leader=leader.host)
        leader.wait_for(lambda state: len(state["replicaGroups"]) == 2)
        return group

    for victim in range(2):
        group = attempt(4 + victim)
        ranks = [rank_in(pod) for pod in group]
        with ThreadPoolExecutor() as pool:
            answers = leader.begin(pool, [long_answer(leader)] * 4)
            os.kill(ranks[victim], signal.SIGKILL)
            assert [pod.process.wait(LEAVE_SECONDS) for pod in group] == [1, 1]
            assert [answer.result(60) for answer in answers] == [whole] * 4
        assert not any(is_alive(pid) for pid in ranks)
        dead, survivor = last_words(group[victim]), last_words(group[1 - victim])
        assert (dead["reason"], dead["rank"], dead["exitCode"]) == ("RankFailed", 2 + victim, -signal.SIGKILL)
        assert dead["message"].startswith(f"rank {2 + victim} was ended by SIGKILL; its last output:\n")
        assert (survivor["reason"], survivor["rank"]) == ("LostRank", 2 + victim)
        assert f"rank {victim} (tensor {victim}, stage 0) is missing" in survivor["message"]
        leader.wait_for(lambda state: len(state["replicaGroups"]) == 1)
    attempt(6)
    assert [ask(leader, 300) for _ in range(2)] == [whole] * 2


def test_pods_that_get_sigterm_together_finish_their_requests(start_group: Callable[..., Any]) -> None:
    first, second = start_group("--pipeline-parallel", "2", "--ranks-per-pod", "1")
    first.wait_ready()
    second.wait_ready()
    whole = ask(first, 300)
    with ThreadPoolExecutor() as pool:
        (answer,) = first.begin(pool, [long_answer(first)])
        for pod in (second, first):
            pod.process.send_signal(signal.SIGTERM)
        assert answer.result(60) == whole
    assert [pod.process.wait(30) for pod in (first, second)] == [0, 0]
    assert not first.termination_log.exists()
    assert not second.termination_log.exists()
