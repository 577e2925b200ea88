"""The role of the leader moves between pods while requests are answered."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from runtime_support.moving_address import MovingAddress
from runtime_support.processes import is_alive
from suite_support.worker import free_host

FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
STORY: list[Any] = [{"role": "user", "content": "Tell a story."}]
FLAGS = ("--dtype", "float32", "--kv-cache-memory", "32Mi", "--frontend-replicas", "1", "--drain-timeout", "20")
LONG = 800
"""Tokens of an answer that is unfinished while a test acts."""


def ask(pod: Any, length: int = 20) -> str:
    """One deterministic answer of this length."""
    answer = pod.openai.chat.completions.create(
        model="chat", messages=FRANCE, temperature=0, max_tokens=length, extra_body={"ignore_eos": True}
    )
    return str(answer.choices[0].message.content)


class Pair:
    """Two pods with one replica group each, and an address that leads to the coordinator of either.

    Args:
        start: Starts the pod of a replica group: its index, its attempt, and whether the pod leads.
    """

    def __init__(self, start: Callable[[int, int, bool], Any], coordinator: MovingAddress) -> None:
        self._start = start
        self.coordinator = coordinator
        self._pods = [start(0, 0, True), start(1, 0, False)]
        coordinator.target = (self.first.host, 5557)
        self._attempts = 0
        self._epoch = 1
        for pod in self._pods:
            pod.wait_ready()
        self.first.wait_for(leads(2))
        self.answer = ask(self.first)
        """The answer before any change."""

    @property
    def first(self) -> Any:
        """The pod that leads before each test."""
        return self._pods[0]

    @property
    def second(self) -> Any:
        return self._pods[1]

    def move_lead(self, pod: Any, **body: str) -> int:
        """Moves the address and then the role, as an operator does. Returns the number of the decision."""
        self._epoch += 1
        self.coordinator.target = (pod.host, 5557)
        assert pod.control.post("/v1/lead", json={"epoch": self._epoch, **body}).status_code == 200
        return self._epoch

    def restore(self) -> None:
        """Replaces a pod that has ended, and lets the first one lead."""
        for index, pod in enumerate(self._pods):
            if pod.process.poll() is not None:
                pod.end()
                self._attempts += 1
                self._pods[index] = self._start(index, self._attempts, False)
                self._pods[index].wait_ready()
        if self.first.state()["role"] != "leader":
            epoch = self.move_lead(self.first)
            assert self.second.control.post("/v1/step-down", json={"epoch": epoch}).status_code == 200
        self.first.wait_for(leads(2))

    def end(self) -> None:
        for pod in self._pods:
            pod.end()


@pytest.fixture(scope="module")
def shared_pair(pod_type: type[Any], tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Iterator[Pair]:
    with MovingAddress(free_host((5557,)), 5557) as coordinator:
        host, port = coordinator.address

        def start(index: int, attempt: int, is_leader: bool) -> Any:
            return pod_type(
                tmp_path_factory.mktemp("pod"),
                "--model",
                str(tiny_checkpoint),
                *FLAGS,
                MEGATRON_LEADER=str(int(is_leader)),
                MEGATRON_LEADER_EPOCH=str(int(is_leader)),
                MEGATRON_REPLICA_GROUP=str(index),
                MEGATRON_ATTEMPT=str(attempt),
                MEGATRON_COORDINATOR_ADDRESS=f"tcp://{host}:{port}",
            )

        pair = Pair(start, coordinator)
        yield pair
        pair.end()


@pytest.fixture
def pair(shared_pair: Pair) -> Pair:
    """The first pod leads; both run."""
    shared_pair.restore()
    return shared_pair


def leads(groups: int, engine: str = "RUNNING") -> Callable[[dict[str, Any]], bool]:
    """Whether a pod leads this number of replica groups in this state."""

    def check(state: dict[str, Any]) -> bool:
        registered = [replica["state"] for replica in state["replicaGroups"]]
        return state["role"] == "leader" and state["engineState"] == engine and registered == [engine] * groups

    return check


def test_every_first_pod_answers_whichever_pod_leads(pair: Pair) -> None:
    assert [pod.state()["role"] for pod in (pair.first, pair.second)] == ["leader", "worker"]
    assert {ask(pair.first), ask(pair.second)} == {pair.answer}


def test_a_healthy_leader_hands_over_under_load_without_a_lost_answer(pair: Pair) -> None:
    pods = (pair.first, pair.second)
    ranks = [pod.child("megatron_runtime.rank") for pod in pods]

    def stream(pod: Any) -> Iterator[str]:
        chunks = pod.openai.chat.completions.create(
            model="chat", messages=STORY, temperature=0, max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
        )
        for chunk in chunks:
            yield from (choice.delta.content or "" for choice in chunk.choices)

    with ThreadPoolExecutor() as pool:
        answers = pair.first.begin_streams(pool, [partial(stream, pod) for pod in pods] * 2)
        epoch = pair.move_lead(pair.second)
        assert pair.first.control.post("/v1/step-down", json={"epoch": epoch}).status_code == 200
        pair.second.wait_for(leads(2))
        assert len({answer.result(60) for answer in answers}) == 1
    former = pair.first.state()
    assert (former["role"], former["epoch"], former["engineState"], former["replicaGroups"]) == (
        "worker",
        epoch,
        None,
        [],
    )
    assert former["ready"]
    assert pair.first.control.post("/v1/pause").json()["error"]["code"] == "NotLeader"
    assert not any("coordinator_process" in command for command in pair.first.children().values())
    # Back at the first pod: its ranks were not restarted.
    epoch = pair.move_lead(pair.first)
    assert pair.second.control.post("/v1/step-down", json={"epoch": epoch}).status_code == 200
    pair.first.wait_for(leads(2))
    assert {ask(pod) for pod in pods} == {pair.answer}
    assert [pod.child("megatron_runtime.rank") for pod in pods] == ranks


def test_requests_of_the_other_pod_continue_when_the_leader_is_lost(pair: Pair) -> None:
    whole = ask(pair.second, LONG)
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(ask, pair.second, LONG) for _ in range(4)]
        os.killpg(pair.first.process.pid, signal.SIGKILL)
        pair.first.process.wait(10)
        pair.move_lead(pair.second)
        assert {answer.result(60) for answer in answers} == {whole}
    pair.second.wait_for(leads(1))


def test_a_paused_service_stays_paused_when_another_pod_leads(pair: Pair) -> None:
    pair.first.signal("pause")
    epoch = pair.move_lead(pair.second, lifecycle="Paused")
    pair.first.control.post("/v1/step-down", json={"epoch": epoch})
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, pair.first)
        pair.second.wait_for(lambda state: leads(2, "PAUSED")(state) and state["requests"]["waiting"] == 1)
        assert pair.second.signal("unpause").status_code == 200
        assert answer.result(30) == pair.answer


def test_a_leader_that_hung_steps_down_and_refuses_older_decisions(pair: Pair) -> None:
    stopped = [pair.first.process.pid, *pair.first.children()]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    epoch = pair.move_lead(pair.second)
    pair.second.wait_for(leads(1))
    assert ask(pair.second) == pair.answer
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    assert pair.first.control.post("/v1/step-down", json={"epoch": epoch}).status_code == 200
    assert pair.first.control.post("/v1/lead", json={"epoch": epoch - 1}).status_code == 409
    assert pair.first.control.post("/v1/lead", json={"epoch": epoch}).status_code == 409
    assert pair.second.control.post("/v1/step-down", json={"epoch": epoch - 1}).status_code == 409
    pair.second.wait_for(leads(2))
    assert not any("coordinator_process" in command for command in pair.first.children().values())
    assert {ask(pair.first), ask(pair.second)} == {pair.answer}


def test_engines_leave_a_leader_whose_launcher_hangs(pair: Pair) -> None:
    pair.second.wait_for(lambda state: all(rank["registered"] for rank in state["ranks"]))
    coordinator = pair.first.child("coordinator_process")
    pair.first.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        assert ask(pair.second) == pair.answer
        pair.second.wait_for(lambda state: not any(rank["registered"] for rank in state["ranks"]))
        waiting = pool.submit(ask, pair.second)
        epoch = pair.move_lead(pair.second)
        pair.second.wait_for(leads(2))
        assert waiting.result(60) == pair.answer
    pair.first.process.send_signal(signal.SIGCONT)
    assert pair.first.control.post("/v1/step-down", json={"epoch": epoch}).status_code == 200
    assert not is_alive(coordinator)
    assert {ask(pair.first), ask(pair.second)} == {pair.answer}


def test_a_pod_that_drains_while_another_leads_closes_its_port_and_finishes_its_requests(pair: Pair) -> None:
    stream = pair.second.openai.chat.completions.create(
        model="chat", messages=STORY, temperature=0, max_tokens=300, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = [next(stream)]
    pair.second.process.send_signal(signal.SIGTERM)
    chunks += list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert pair.second.process.wait(30) == 0
    assert ask(pair.first) == pair.answer


def test_a_pod_that_drains_answers_on_connections_that_clients_have_open(pair: Pair) -> None:
    body = json.dumps({"model": "chat", "messages": FRANCE, "max_tokens": 2})
    used, late, idle = (http.client.HTTPConnection(pair.second.host, 8000, timeout=30) for _ in range(3))

    def ask_on(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()
        return answer

    for connection in (used, idle):
        assert ask_on(connection).getheader("connection") is None
    pair.second.process.send_signal(signal.SIGTERM)
    pair.second.wait_for(lambda state: state["draining"])
    # A client may not have learned yet that the pod leaves the Service.
    ask_on(late)
    pair.second.wait_for(lambda _: refuses(pair.second.host))
    for connection in (used, late):
        assert ask_on(connection).getheader("connection") == "close"
    assert pair.second.process.wait(30) == 0
    assert idle.sock.recv(1) == b""
    idle.close()


def refuses(host: str) -> bool:
    """Whether the serving port of the host is closed."""
    with socket.socket() as client:
        return client.connect_ex((host, 8000)) != 0
