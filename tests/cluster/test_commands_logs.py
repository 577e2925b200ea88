"""`logs` on a real cluster, with the simulated log endpoint of a kubelet."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from cluster_support.control_plane import ControlPlane
from operator_support.api import Api
from operator_support.command_line import CommandLine
from operator_support.kubelet_logs import KubeletLogs
from operator_support.resource import Resource
from operator_support.scripted_node import ScriptedNode


@pytest.fixture
async def kubelet(api: Api, node: ScriptedNode) -> AsyncIterator[KubeletLogs]:
    async with KubeletLogs(api, node.name) as kubelet:
        yield kubelet


@pytest.fixture
async def written(chat: Resource, kubelet: KubeletLogs) -> KubeletLogs:
    """Logs of two groups of two ranks each, with alternating lines."""
    await chat.create(replicas=2, parallelism={"tensor": 2}, pods={"device": "cpu", "ranksPerPod": 2})
    await chat.until(lambda status: status.get("ready") == "2/2", "both groups")
    await kubelet.write(
        "chat-0-0-0", ("10:00:01", "launcher begins"), ("10:00:03", "[rank 0] a"), ("10:00:05", "[rank 1] b")
    )
    await kubelet.write("chat-1-0-0", ("10:00:02", "launcher begins"), ("10:00:04", "[rank 1] c"))
    return kubelet


@pytest.mark.usefixtures("written")
async def test_the_lines_of_all_pods_come_in_order_of_time(command_line: CommandLine) -> None:
    assert (await command_line.ok("logs", "chat")).splitlines() == [
        "chat-0-0-0 launcher begins",
        "chat-1-0-0 launcher begins",
        "chat-0-0-0 [rank 0] a",
        "chat-1-0-0 [rank 1] c",
        "chat-0-0-0 [rank 1] b",
    ]


@pytest.mark.usefixtures("written")
async def test_one_group_or_rank_can_be_selected(command_line: CommandLine) -> None:
    assert (await command_line.ok("logs", "chat", "--rank", "1")).splitlines() == [
        "chat-1-0-0 [rank 1] c",
        "chat-0-0-0 [rank 1] b",
    ]
    assert (await command_line.ok("logs", "chat", "--group", "0", "--rank", "0")).split() == [
        "chat-0-0-0",
        "[rank",
        "0]",
        "a",
    ]
    done = await command_line.run("logs", "chat", "--rank", "2")
    assert (done.code, done.error_line) == (2, "error: --rank 2: a replica group of chat has ranks 0 to 1")
    done = await command_line.run("logs", "chat", "--group", "7")
    assert (done.code, done.out, done.err) == (0, "", "chat has no pods in replica group 7\n")


async def test_the_kubelet_filters_the_lines(command_line: CommandLine, written: KubeletLogs) -> None:
    output = await command_line.ok("logs", "chat", "--tail", "1", "--since", "2h")
    assert output.splitlines() == ["chat-1-0-0 [rank 1] c", "chat-0-0-0 [rank 1] b"]
    assert {(query["tailLines"], query["sinceSeconds"]) for query in written.queries} == {("1", "7200")}
    await written.write("chat-0-0-0", ("10:00:06", "[rank 1] d"))
    assert (await command_line.ok("logs", "chat", "-g", "0", "-r", "0", "--tail", "1")).splitlines() == [
        "chat-0-0-0 [rank 0] a"
    ]


async def test_a_log_is_followed_without_gaps_or_repetitions_and_new_pods_join_in(
    chat: Resource, node: ScriptedNode, command_line: CommandLine, written: KubeletLogs
) -> None:
    async with command_line.lines("logs", "chat", "--follow", "--group", "1") as lines:
        assert [await anext(lines), await anext(lines)] == ["chat-1-0-0 launcher begins", "chat-1-0-0 [rank 1] c"]
        await written.write("chat-1-0-0", ("10:00:04", "[rank 0] d"), ("10:00:05", "[rank 0] e"))
        said = [await anext(lines)]
        if said == ["chat-1-0-0 [rank 0] d"]:
            said = [await anext(lines)]
        assert said == ["chat-1-0-0 [rank 0] e"]
        await chat.kubectl("delete", "pod", "chat-1-0-0", "--wait=false")
        await written.write("chat-1-1-0", ("10:00:09", "launcher begins again"))
        assert await anext(lines) == "chat-1-1-0 launcher begins again"
    assert "chat-1-1-0" in node.launchers


@pytest.mark.usefixtures("node")
async def test_a_missing_kubelet_is_reported_in_one_line(chat: Resource, command_line: CommandLine) -> None:
    await chat.create()
    await chat.until_phase("Running")
    done = await command_line.run("logs", "chat")
    assert done.code == 1
    assert done.error_line.startswith("chat-0-0-0: cannot be read: ")


@pytest.mark.usefixtures("stage")
async def test_a_pod_that_has_not_started_has_no_log_yet(chat: Resource, command_line: CommandLine) -> None:
    await chat.create()
    await chat.until_pods("chat-0-0-0")
    done = await command_line.run("logs", "chat")
    assert (done.code, done.error_line) == (0, "chat-0-0-0 has not started: it has no log yet")


@pytest.mark.usefixtures("node")
async def test_following_outlasts_a_restart_of_the_api_server(
    command_line: CommandLine, written: KubeletLogs, own_control_plane: ControlPlane
) -> None:
    async with command_line.lines("logs", "chat", "--follow", "--group", "1") as lines:
        assert [await anext(lines), await anext(lines)] == ["chat-1-0-0 launcher begins", "chat-1-0-0 [rank 1] c"]
        await asyncio.to_thread(own_control_plane.restart_apiserver)
        await written.write("chat-1-0-0", ("10:00:07", "[rank 0] still here"))
        assert await anext(lines) == "chat-1-0-0 [rank 0] still here"


async def test_lines_that_are_excluded_before_following_stay_excluded(
    command_line: CommandLine, written: KubeletLogs
) -> None:
    async with command_line.lines("logs", "chat", "--follow", "--group", "1", "--tail", "0") as lines:
        async with asyncio.timeout(60):
            await written.until_followed()
        await written.write("chat-1-0-0", ("10:00:08", "[rank 0] new"))
        assert await anext(lines) == "chat-1-0-0 [rank 0] new"
