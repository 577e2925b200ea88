"""A replica group of several ranks through the launcher: it gives the answers of one rank, and restarts as a whole."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_support.one_rank import answer_of_one_rank
from runtime_support.processes import is_alive
from runtime_support.tiny_checkpoint import write_tiny_checkpoint
from transformers import AutoModel

from megatron_runtime.inference_client import InferenceClient

PROMPT = [5, 6, 7, 8, 9]
LENGTH = 600
FLAGS = ("--dtype", "float32", "--kv-cache-memory", "8Mi", "--frontend-replicas", "1")
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), longest=2048)


@pytest.fixture(scope="module")
def pod(pod_type: type[Any], checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two replica groups of two ranks; they run after each test."""
    flags = ("--model", str(checkpoint), *FLAGS, "--tensor-parallel", "2", "--replica-groups", "2")
    started = pod_type(tmp_path_factory.mktemp("pod"), *flags)
    try:
        started.wait_for(lambda state: state["ready"] and len(state["replicaGroups"]) == 2)
        yield started
    finally:
        started.end()


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> str:
    return answer_of_one_rank(checkpoint, PROMPT, LENGTH)


def ask(pod: Any) -> str:
    answer = pod.openai.completions.create(
        model="chat", prompt=PROMPT, temperature=0, max_tokens=LENGTH, extra_body={"ignore_eos": True}
    )
    return str(answer.choices[0].text)


def stream(pod: Any) -> Iterator[str]:
    chunks = pod.openai.completions.create(
        model="chat", prompt=PROMPT, temperature=0, max_tokens=LENGTH, stream=True, extra_body={"ignore_eos": True}
    )
    for chunk in chunks:
        yield from (choice.text for choice in chunk.choices)


def ranks_of(pod: Any) -> dict[int, int]:
    """Process ids by rank."""
    commands = {pid: command for pid, command in pod.children().items() if "megatron_runtime.rank" in command}
    return {
        json.loads(command.split(" -m megatron_runtime.rank ")[1])["rank"]: pid for pid, command in commands.items()
    }


async def outstanding_requests(pod: Any) -> int:
    """The number of requests that the coordinator has no answer for, which is exact while the engines are paused."""
    client = InferenceClient(f"tcp://{pod.host}:5557", key=pod.key)
    await client.start()
    try:
        return (await client.service_state()).outstanding_requests
    finally:
        client.stop()


def begin_and_pause(pod: Any, pool: ThreadPoolExecutor) -> list[Future[str]]:
    """Four answers that are paused before their end. On a loaded machine the pause may come too late for the first.

    The end of such an answer can still be on its way when the engines are paused, so the coordinator is asked.
    """
    for _ in range(5):
        answers: list[Future[str]] = pod.begin_streams(pool, [partial(stream, pod)] * 4)
        assert pod.signal("pause").json()["engineState"] == "PAUSED"
        if asyncio.run(outstanding_requests(pod)) == len(answers):
            return answers
        assert pod.signal("unpause").json()["engineState"] == "RUNNING"
        wait(answers)
    raise AssertionError("every pause came after the end of an answer")


def test_divided_models_give_the_answers_of_whole_ones_through_pause_and_suspension(pod: Any, whole: str) -> None:
    assert [rank["phase"] for rank in pod.state()["ranks"]] == ["Serving"] * 4
    with ThreadPoolExecutor() as pool:
        answers = begin_and_pause(pod, pool)
        for signal_name, state in (("suspend", "SUSPENDED"), ("resume", "PAUSED")):
            assert pod.signal(signal_name).json()["engineState"] == state
        assert not any(answer.done() for answer in answers)
        assert pod.signal("unpause").json()["engineState"] == "RUNNING"
        assert [answer.result(60) for answer in answers] == [whole] * 4


def test_divided_layers_give_the_embeddings_of_whole_ones(pod: Any, checkpoint: Path) -> None:
    (found,) = pod.openai.embeddings.create(model="chat", input=PROMPT).data
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        last = model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
    expected = torch.nn.functional.normalize(last, dim=0)
    torch.testing.assert_close(torch.tensor(found.embedding), expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank_restarts_its_replica_group_and_no_other(pod: Any, whole: str, victim: int) -> None:
    before, restarts = ranks_of(pod), pod.state()["restarts"]
    fellows = [pid for rank, pid in before.items() if rank // 2 == victim // 2]
    others = {rank: pid for rank, pid in before.items() if rank // 2 != victim // 2}
    with ThreadPoolExecutor() as pool:
        answers = pod.begin_streams(pool, [partial(stream, pod)] * 4)
        os.kill(before[victim], signal.SIGKILL)
        pod.wait_for(lambda _: not any(is_alive(pid) for pid in fellows), seconds=10)
        assert [answer.result(60) for answer in answers] == [whole] * 4
    pod.wait_for(lambda state: state["restarts"] == restarts + 1 and ranks_of(pod).keys() == before.keys())
    pod.wait_for(lambda state: len(state["replicaGroups"]) == 2)
    assert others.items() <= ranks_of(pod).items()
    assert ask(pod) == whole


def test_a_hanging_rank_is_restarted_with_its_replica_group_which_continues_the_requests(
    start_pod: Callable[..., Any], checkpoint: Path, whole: str
) -> None:
    pod = start_pod("--model", str(checkpoint), *FLAGS, "--tensor-parallel", "2").wait_ready()
    before = ranks_of(pod)
    with ThreadPoolExecutor() as pool:
        answers = pod.begin_streams(pool, [partial(stream, pod)] * 2)
        os.kill(before[1], signal.SIGSTOP)
        assert [answer.result(60) for answer in answers] == [whole] * 2
    assert not any(is_alive(pid) for pid in before.values())
    hang = "rank 1 sent no heartbeat for 4 s and was killed: all its threads were blocked"
    assert hang in pod.log.read_text()


def test_the_last_output_of_a_killed_rank_is_in_the_message_and_a_stop_ends_all(
    start_pod: Callable[..., Any], checkpoint: Path
) -> None:
    flags = ("--model", str(checkpoint), *FLAGS, "--pipeline-parallel", "2", "--max-restarts", "0")
    killed, stopped = start_pod(*flags), start_pod(*flags)
    killed.wait_ready()
    os.kill(ranks_of(killed)[1], signal.SIGKILL)
    assert killed.process.wait(10) == 1
    reason = json.loads(killed.termination_log.read_text())
    assert (reason["reason"], reason["rank"], reason["exitCode"]) == ("RankFailed", 1, -signal.SIGKILL)
    assert reason["message"].startswith("rank 1 was ended by SIGKILL; its last output:\n")
    assert "Loaded" in reason["message"]
    stopped.wait_ready()
    stopped.process.send_signal(signal.SIGTERM)
    assert stopped.process.wait(30) == 0


@pytest.mark.parametrize("tensor", ["2", "1"])
def test_experts_are_divided_over_the_ranks_of_a_replica_group(
    start_pod: Callable[..., Any], tmp_path: Path, tensor: str
) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "mixture", longest=2048, experts=4)
    flags = ("--model", str(checkpoint), *FLAGS, "--tensor-parallel", tensor, "--expert-parallel", "2")
    pod = start_pod(*flags).wait_ready()
    assert [rank["phase"] for rank in pod.state()["ranks"]] == ["Serving"] * 2
    assert ask(pod) == answer_of_one_rank(checkpoint, PROMPT, LENGTH)


@pytest.mark.model
def test_three_ranks_share_smollm2(start_pod: Callable[..., Any], smollm2_path: Path) -> None:
    flags = ("--dtype", "float32", "--kv-cache-memory", "64Mi", "--tensor-parallel", "3", "--frontend-replicas", "1")
    pod = start_pod("--model", str(smollm2_path), *flags).wait_ready()
    answer = pod.openai.chat.completions.create(model="chat", messages=FRANCE, temperature=0, max_tokens=20)
    assert answer.choices[0].message.content == "The capital of France is Paris."
