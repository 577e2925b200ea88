"""`megatron-operator local` with replica groups of several pods: they answer like one rank, and fail as a whole."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from runtime_support.one_rank import answer_of_one_rank
from runtime_support.tiny_checkpoint import write_tiny_checkpoint

PROMPT = [5, 6, 7, 8, 9]
LENGTH = 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that three tensor-parallel ranks can divide."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), hidden=48, heads=6, kv_heads=3, longest=2048)


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> str:
    return answer_of_one_rank(checkpoint, PROMPT, LENGTH)


@pytest.fixture(scope="module")
def spread(command_type: Any, tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Any]:
    """Two replica groups of three ranks in two pods each; they run after each test."""
    changes = {
        "model": {"source": {"path": f"/models/{checkpoint.name}"}},
        "parallelism": {"tensor": 3},
        "pods": {"ranksPerPod": 2},
        "engine": {"kvCacheMemory": "32Mi"},
        "frontend": {"replicas": 1},
    }
    command = command_type.of_sample(tmp_path_factory.mktemp("spread"), checkpoint.parent, **changes)
    try:
        command.wait_for("ready replicas: 2/2")
        yield command
    finally:
        command.close()


def ask(url: str) -> str:
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=url, api_key="none", timeout=100, http_client=http) as api:
        answer = api.completions.create(
            model="smollm2", prompt=PROMPT, temperature=0, max_tokens=LENGTH, extra_body={"ignore_eos": True}
        )
    return answer.choices[0].text


def rank_process(command: Any, rank: int) -> int:
    """Process id of one rank, counted over all replica groups."""
    found = [process.pid for process in command.seen if _is_rank(process.pid, rank)]
    assert len(found) == 1
    return found[0]


def _is_rank(pid: int, rank: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False
    return "megatron_runtime.rank" in words and f'"rank": {rank},' in words


def test_replica_groups_of_several_pods_answer_like_one_rank(spread: Any, whole: str) -> None:
    assert {ask(spread.url) for _ in range(4)} == {whole}
    addresses = dict(re.findall(r"pod (smollm2-\d-0-\d): \S+ at (127\.\S+?),?(?:\s|$)", spread.text))
    assert sorted(addresses) == ["smollm2-0-0-0", "smollm2-0-0-1", "smollm2-1-0-0", "smollm2-1-0-1"]
    assert len(set(addresses.values())) == 4


def test_a_killed_rank_has_all_pods_of_its_group_replaced_while_the_other_group_answers(
    spread: Any, whole: str
) -> None:
    before = len(spread.lines)
    spread.wait_for("ready replicas: 2/2")
    os.kill(rank_process(spread, 5), signal.SIGKILL)
    event = spread.wait_for("GroupFailed: ", after=before).string
    assert "smollm2-1-0-1 rank 5: RankFailed" in event
    assert ask(spread.url) == whole
    for pod in ("smollm2-1-0-0", "smollm2-1-0-1"):
        spread.wait_for(rf"pod {pod}: gone", after=before)
    for pod in ("smollm2-1-1-0", "smollm2-1-1-1"):
        spread.wait_for(rf"pod {pod}: Ready", after=before)
    spread.wait_for("ready replicas: 2/2", after=before)
    assert {ask(spread.url) for _ in range(4)} == {whole}


def test_the_other_group_is_kept_when_the_leaders_group_fails(spread: Any, whole: str) -> None:
    before = len(spread.lines)
    os.kill(rank_process(spread, 2), signal.SIGKILL)
    event = spread.wait_for("GroupFailed: ", after=before).string
    assert "smollm2-0-0-1 rank 2: RankFailed" in event
    spread.wait_for("pod smollm2-0-1-1: Ready", after=before)
    spread.wait_for("ready replicas: 2/2", after=before)
    assert {ask(spread.url) for _ in range(4)} == {whole}
    assert "group 1 starts" not in "\n".join(spread.lines[before:])


def test_replica_groups_of_several_pods_pause_suspend_and_resume(spread: Any, whole: str) -> None:
    for lifecycle in ("Suspended", "Running"):
        spread.wait_for(f"phase: {lifecycle}", after=spread.edit(lifecycle=lifecycle))
    assert ask(spread.url) == whole


def test_no_process_of_any_pod_is_left_at_the_end(spread: Any) -> None:
    spread.signal(signal.SIGINT)
    assert spread.exit_code() == 0
    assert spread.left_over() == set()
