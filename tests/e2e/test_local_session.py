"""`megatron-operator local` with the real runtime and real weights: one resource through its lifecycle."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.model

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


def client(url: str) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=url, api_key="none", timeout=100, http_client=http)


def ask(url: str) -> str:
    with client(url) as api:
        reply = api.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=20)
    return reply.choices[0].message.content or ""


def test_a_resource_serves_complete_and_streamed_answers(served) -> None:
    assert "Paris" in ask(served.url)
    with client(served.url) as api:
        stream = api.chat.completions.create(
            model="smollm2", messages=QUESTION, temperature=0, max_tokens=20, stream=True
        )
        pieces = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
    assert "Paris" in "".join(pieces)
    assert len([piece for piece in pieces if piece]) > 1


def test_every_pod_has_its_own_processes_and_address(served) -> None:
    addresses = set(re.findall(r"pod \S+: \S+ at (127\.\S+?),?(?:\s|$)", served.text))
    assert len(addresses) == 2


def test_a_request_to_a_paused_engine_waits_until_it_runs_again(served) -> None:
    served.wait_for("phase: Paused", after=served.edit(lifecycle="Paused"))
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(ask(served.url)))
    asking.start()
    asking.join(2)
    assert answers == []
    served.wait_for("phase: Running", after=served.edit(lifecycle="Running"))
    asking.join(100)
    assert "Paris" in answers[0]


def test_suspend_and_resume_give_the_same_answer(served) -> None:
    before = ask(served.url)
    served.wait_for("phase: Suspended", after=served.edit(lifecycle="Suspended"))
    served.wait_for("phase: Running", after=served.edit(lifecycle="Running"))
    assert ask(served.url) == before


def test_an_invalid_edit_is_refused_and_the_pods_continue(served) -> None:
    after = served.edit(replicsa=3)
    refusal = served.wait_for("refused", after=after).string
    assert "spec.replicsa: 3: unknown field; did you mean replicas?" in refusal
    assert "Paris" in ask(served.url)
    del served.resource["spec"]["replicsa"]
    served.write()


def test_replica_groups_follow_the_file(served) -> None:
    served.wait_for(r"pod smollm2-1-\d+-0: gone", after=served.edit(replicas=1))
    assert "Paris" in ask(served.url)
    served.wait_for("ready replicas: 2/2", after=served.edit(replicas=2))
    assert "Paris" in ask(served.url)


def test_a_killed_replica_group_is_replaced_while_the_other_answers(served) -> None:
    before = len(served.lines)
    launchers = [process.pid for process in served.seen if _is_launcher_of(process.pid, group=1)]
    assert len(launchers) == 1
    os.kill(launchers[0], signal.SIGKILL)
    served.wait_for("ready replicas: 1/2", after=before)
    assert "Paris" in ask(served.url)
    served.wait_for("ready replicas: 2/2", after=before)


def test_an_interrupt_ends_everything_with_exit_code_0(served) -> None:
    served.signal(signal.SIGINT)
    assert served.exit_code() == 0
    assert served.lines[-1] == "all pods have ended"
    assert len(served.seen) >= 7
    assert served.left_over() == set()


def _is_launcher_of(pid: int, group: int) -> bool:
    process = Path(f"/proc/{pid}")
    try:
        leads = f"MEGATRON_REPLICA_GROUP={group}\0" in (process / "environ").read_text()
        return leads and "megatron-serve" in (process / "cmdline").read_text()
    except OSError:
        return False
