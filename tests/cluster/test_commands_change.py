"""`pause`, `unpause`, `suspend`, `resume`, `stop` and `start` on a real cluster."""

import asyncio

import pytest
from operator_support.command_line import CommandLine
from operator_support.resource import Resource
from operator_support.scripted_node import ScriptedNode


async def test_each_verb_waits_until_the_state_is_reached(
    chat: Resource, node: ScriptedNode, command_line: CommandLine
) -> None:
    await chat.create()
    for verb, phase, engine in (
        ("start", "Running", "RUNNING"),
        ("pause", "Paused", "PAUSED"),
        ("unpause", "Running", "RUNNING"),
        ("suspend", "Suspended", "SUSPENDED"),
        ("resume", "Paused", "PAUSED"),
        ("start", "Running", "RUNNING"),
        ("stop", "Stopped", None),
        ("start", "Running", "RUNNING"),
    ):
        output = await command_line.ok(verb, "chat", "--wait")
        status = await chat.status()
        assert (status["phase"], status.get("engineState")) == (phase, engine), output
        assert output.splitlines()[-1] == f"chat is {phase}"
    assert node.launchers["chat-0-1-0"].signals == []


@pytest.mark.usefixtures("node")
async def test_nothing_but_the_lifecycle_changes(chat: Resource, command_line: CommandLine) -> None:
    await chat.create(replicas=2)
    before = (await chat.get("mi", "chat"))["spec"]
    assert "the desired state of chat is now Paused" in await command_line.ok("pause", "chat")
    assert (await chat.get("mi", "chat"))["spec"] == {**before, "lifecycle": "Paused"}
    assert await command_line.ok("pause", "chat") == "the desired state of chat is Paused already\n"


async def test_an_impossible_verb_is_refused_and_changes_nothing(chat: Resource, command_line: CommandLine) -> None:
    await chat.create(lifecycle="Stopped")
    generation = (await chat.get("mi", "chat"))["metadata"]["generation"]
    for verb in ("pause", "unpause", "suspend", "resume"):
        done = await command_line.run(verb, "chat")
        assert done.code == 1
        assert done.error_line.startswith("error: the desired state of chat is Stopped: there is n")
        assert done.error_line.endswith(("`start` it", "`start` it first"))
    assert (await chat.get("mi", "chat"))["metadata"]["generation"] == generation


async def test_a_wait_ends_with_the_reason_when_the_resource_fails(
    chat: Resource, stage: ScriptedNode, command_line: CommandLine
) -> None:
    await chat.create(lifecycle="Stopped")
    await chat.until_phase("Stopped")
    waiting = asyncio.create_task(command_line.run("start", "chat", "--wait"))
    pod = next(iter((await chat.until_pods("chat-0-0-0")).values()))
    await stage.run(pod)
    words = {"reason": "CheckpointError", "message": "/models/m.gguf: not found", "exitCode": 2}
    await stage.fail(pod, 2, words)
    done = await waiting
    assert done.code == 1
    assert done.error_line.startswith("error: chat failed, CheckpointError: ")
    assert "/models/m.gguf: not found" in done.error_line


@pytest.mark.usefixtures("stage")
async def test_a_wait_that_times_out_reports_what_it_waits_for(chat: Resource, command_line: CommandLine) -> None:
    await chat.create(lifecycle="Stopped")
    await chat.until_phase("Stopped")
    done = await command_line.run("start", "chat", "--wait", "--timeout", "3s")
    assert done.code == 1
    assert done.error_line.startswith("error: chat is not Running after 3s: Pending, Pending: chat-0-0-0 is Pending")


@pytest.mark.usefixtures("stage")
async def test_a_wait_ends_when_another_client_changes_the_lifecycle_or_deletes(
    chat: Resource, command_line: CommandLine
) -> None:
    await chat.create(lifecycle="Stopped")
    await chat.until_phase("Stopped")
    waiting = asyncio.create_task(command_line.run("start", "chat", "--wait"))
    await chat.until_pods("chat-0-0-0")
    await chat.patch({"lifecycle": "Paused"})
    assert (await waiting).error_line == "error: the desired state of chat was changed to Paused meanwhile"
    waiting = asyncio.create_task(command_line.run("start", "chat", "--wait"))
    await chat.until_found("mi", "chat", lambda found: found["spec"]["lifecycle"] == "Running")
    await chat.kubectl("delete", "mi", "chat", "--wait=false")
    done = await waiting
    assert (done.code, done.error_line) == (1, "error: chat was deleted meanwhile")
