"""The output of a local session."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from planning_support.resources import resource_object
from rich.console import Console

from megatron_operator.api.parse import parse_resource
from megatron_operator.api.v1alpha1 import Condition, MegatronInferenceStatus, Phase
from megatron_operator.local.plain_view import PlainView
from megatron_operator.local.pod_manifest import PathMap
from megatron_operator.local.session import INVALID, SERVED, LocalSession
from megatron_operator.local.session_lock import AlreadyServedError, session_lock
from megatron_operator.local.snapshot import Snapshot
from megatron_operator.local.table_view import draw
from megatron_operator.local.token_rate import TokenRate
from megatron_operator.observed_state import (
    EngineState,
    Loading,
    ObservedEngine,
    ObservedPod,
    ObservedReplica,
    ObservedState,
    PodPhase,
)

RESOURCE = parse_resource(
    {
        "apiVersion": "inference.megatron.dev/v1alpha1",
        "kind": "MegatronInference",
        "metadata": {"name": "chat"},
        "spec": {"replicas": 2, "model": {"source": {"path": "/models/a.gguf"}}, "pods": {"device": "cpu"}},
    }
)


@pytest.fixture
def loading() -> Snapshot:
    leader = ObservedPod(
        name="chat-0-1-0",
        uid="1",
        group=0,
        attempt=1,
        index=0,
        leader=True,
        template_hash="a",
        phase=PodPhase.RUNNING,
        ready=False,
        created_at=0.0,
        address="127.64.0.1",
        rank_phase="Loading",
        loading=Loading(30_000_000, 100_000_000),
    )
    ready = Condition(
        type="Ready",
        status="False",
        reason="ModelLoading",
        message="weights",
        last_transition_time="2026-01-01T00:00:00Z",
    )
    return Snapshot(
        RESOURCE,
        MegatronInferenceStatus(phase=Phase.STARTING, conditions=[ready]),
        ObservedState(now=0.0, pods=(leader,)),
    )


@pytest.fixture
def running(loading: Snapshot) -> Snapshot:
    pod = replace(loading.observed.pods[0], ready=True, rank_phase="Serving", loading=None)
    engine = ObservedEngine(True, EngineState.RUNNING, (ObservedReplica(0, EngineState.RUNNING),))
    status = MegatronInferenceStatus(
        phase=Phase.RUNNING, engine_state="RUNNING", ready_replicas=2, url="http://127.0.0.1:8000/v1"
    )
    return replace(loading, status=status, observed=ObservedState(now=0.0, pods=(pod,), engine=engine))


def on_screen(snapshot: Snapshot) -> str:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    console.print(draw(snapshot))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_the_table_shows_the_progress_of_the_weights(loading: Snapshot) -> None:
    screen = on_screen(loading)
    for words in ("Starting", "0/2", "ModelLoading", "chat-0-1-0", "127.64.0.1", "Loading", "30 %", "━"):
        assert words in screen


def test_the_table_shows_phase_engine_and_url(running: Snapshot) -> None:
    screen = on_screen(running)
    for words in ("Running", "RUNNING", "2/2", "http://127.0.0.1:8000/v1", "Ready"):
        assert words in screen


@pytest.mark.parametrize("name", ["chat-0-1-0", "qwen3-30b-a3b-instruct-2507-0-1-0"])
def test_the_table_shows_elapsed_time_and_traffic_in_80_columns(running: Snapshot, name: str) -> None:
    pod = replace(running.observed.pods[0], name=name, address="127.127.255.254", rank_phase="Registering", ready=False)
    engine = ObservedEngine(
        True,
        EngineState.SUSPENDING,
        replicas=(ObservedReplica(0, EngineState.SUSPENDING),),
        running_requests=12,
        waiting_requests=3,
    )
    observed = replace(running.observed, pods=(replace(pod, loading=Loading(10**9, 10**10)),), engine=engine)
    status = running.status.model_copy(update={"engine_state": "SUSPENDING"})
    screen = on_screen(replace(running, status=status, observed=observed, elapsed=3725.4, tokens_per_second=1234.56))
    assert max(map(len, screen.splitlines())) == 80
    assert "…" not in screen
    for words in ("1:02:05", " 12 ", " 3 ", "1234.6", "SUSPENDING", "Registering", "127.127.255.254", "10 %"):
        assert words in screen
    lines = screen.splitlines()
    (first,) = (number for number, line in enumerate(lines) if "127.127.255.254" in line)
    width = lines[first].index("leader")
    assert "".join(line[:width].strip(" │╰─") for line in lines[first:]) == name


def test_the_rate_of_tokens_is_that_of_the_last_seconds() -> None:
    rate = TokenRate()
    readings = [(0.0, 0), (1.0, 50), (4.0, 50), (8.0, 50), (9.0, 7), (10.0, 17)]
    assert [rate.add(now, tokens) for now, tokens in readings] == [0.0, 50.0, 12.5, 0.0, 0.0, 10.0]


def test_a_second_session_for_the_same_file_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "chat.yaml"
    file.touch()
    with session_lock(file):
        words = rf"{file} is already served by process {os.getpid()}: edit the file"
        with pytest.raises(AlreadyServedError, match=words), session_lock(tmp_path / "." / "chat.yaml"):
            pytest.fail("two sessions serve one file")
        with session_lock(tmp_path / "other.yaml"):
            pass
    with session_lock(file):
        pass


async def test_a_session_for_a_file_that_is_served_says_so(tmp_path: Path) -> None:
    file, output = tmp_path / "chat.yaml", io.StringIO()
    with session_lock(file):
        session = LocalSession(file, paths=PathMap(), view=PlainView(Console(file=output)))
        assert await session.run() == INVALID
    assert f"refused: {file} is already served by process {os.getpid()}" in output.getvalue()


async def test_a_session_says_that_nothing_is_stopped_for_being_idle(tmp_path: Path) -> None:
    file, output = tmp_path / "chat.yaml", io.StringIO()
    idle = {"idleAfter": "1h", "stopAfter": "1h"}
    file.write_text(json.dumps(resource_object(model={"source": {"path": str(file)}}, autoSuspend=idle)))
    session = LocalSession(file, paths=PathMap(), view=PlainView(Console(file=output)))
    session.stop()
    assert await session.run() == SERVED
    assert output.getvalue().count("spec.autoSuspend.stopAfter: has no effect on this machine") == 1


def test_the_table_shows_a_rejected_edit_and_the_shutdown(running: Snapshot) -> None:
    screen = on_screen(replace(running, problems=("spec.x: 1: unknown field",), ending=True))
    assert "refused: spec.x: 1: unknown field" in screen
    assert "Ctrl-C again kills the pods at once" in screen
    assert "Terminating" in screen


def test_plain_output_reports_each_change_once(loading: Snapshot, running: Snapshot) -> None:
    output = io.StringIO()
    view = PlainView(Console(file=output, width=40))
    view.show(loading)
    assert "phase: Starting" in output.getvalue()
    assert "pod chat-0-1-0: Loading at 127.64.0.1, 25 % of the weights read" in output.getvalue()
    output.truncate(0)
    view.show(loading)
    assert output.getvalue().strip("\0") == ""
    view.show(running)
    assert "phase: Running\nengine: RUNNING\nready replicas: 2/2\n" in output.getvalue()
    view.show(replace(running, observed=ObservedState(now=1.0)))
    assert "pod chat-0-1-0: gone" in output.getvalue()
