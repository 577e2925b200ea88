"""Speculation with a draft model in launched pods: the same answers, streamed or not, and its metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from suite_support.console_runs import documented
from suite_support.doc_shell import DocShell

FLAGS = ("--dtype", "float32", "--kv-cache-memory", "32Mi", "--frontend-replicas", "1")
GENERATED = 48


def answers(pod: Any) -> list[list[int]]:
    """Tokens of a greedy and of a sampled answer, each also as a stream."""
    found = []
    for sampling in ({"temperature": 0}, {"temperature": 1, "seed": 5}):
        asked: dict[str, Any] = {"model": "chat", "prompt": [65] * 20, "max_tokens": GENERATED, **sampling}
        extra = {"ignore_eos": True, "return_token_ids": True}
        whole = pod.openai.completions.create(**asked, extra_body=extra)
        found.append(whole.choices[0].token_ids)
        streamed: list[int] = []
        for chunk in pod.openai.completions.create(**asked, extra_body=extra, stream=True):
            streamed += chunk.choices[0].token_ids or []
        found.append(streamed)
    return found


def draft_tokens(pod: Any) -> tuple[float, float]:
    """Drafted and accepted tokens of all replica groups, of one scrape."""
    families = list(text_string_to_metric_families(pod.control.get("/metrics").text))
    samples = [sample for family in families for sample in family.samples]
    names = ("megatron_draft_tokens_total", "megatron_accepted_draft_tokens_total")
    drafted, accepted = (sum(each.value for each in samples if each.name == name) for name in names)
    return drafted, accepted


@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_are_those_without_a_draft_model_and_drafts_are_counted(
    tiny_pod: Any, start_pod: Callable[..., Any], tiny_checkpoint: Path, tmp_path: Path, ranks: int
) -> None:
    (serve,) = documented("docs/sampling.md", "megatron-serve")
    reader = DocShell(tmp_path / "reader")
    for name in ("SmolLM2-1.7B-Instruct", "SmolLM2-135M-Instruct"):
        (reader.checkout / name).symlink_to(tiny_checkpoint)
    flags = (*FLAGS, "--tensor-parallel", str(ranks))
    pod = start_pod(*flags, program=reader.words(serve.command), PATH=reader.environment["PATH"]).wait_ready()
    given = answers(pod)
    assert given == answers(tiny_pod)
    assert {len(tokens) for tokens in given} == {GENERATED}
    # How many depends on times here: right drafts of a model that is as large as the served one save none.
    pod.wait_for(lambda _: draft_tokens(pod)[1] > 0, seconds=10)
    drafted, accepted = draft_tokens(pod)
    assert drafted >= accepted
