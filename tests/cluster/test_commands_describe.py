"""`describe`, and the errors of all commands, on a real cluster."""

import json
from pathlib import Path

from cluster_support.cluster import Cluster
from cluster_support.control_plane import free_ports
from cluster_support.pki import write_kubeconfig
from operator_support.command_line import CommandLine
from operator_support.resource import Resource
from operator_support.scripted_node import ScriptedNode


async def test_describe_shows_when_a_failed_group_restarts(
    chat: Resource, node: ScriptedNode, command_line: CommandLine
) -> None:
    await chat.create(replicas=2, failurePolicy={"backoff": "5m"})
    await chat.until(lambda status: status.get("ready") == "2/2", "both groups")
    await node.fail((await chat.pods())["chat-1-0-0"], 137, "", reason="OOMKilled")
    await chat.until_phase("Degraded")
    why, _, groups = (await command_line.ok("describe", "chat")).partition("Groups")
    assert why.count("chat-1-0-0: OOMKilled (exit code 137): killed (exit code 137), perhaps because memory ran") == 1
    assert "BackOff: replica group 1 failed: chat-1-0-0: OOMKilled" in groups
    assert "; restart 1 of 5 at " in groups
    assert "megatron-operator logs chat" in groups


async def test_describe_shows_what_the_resource_waits_for_and_the_next_step(
    chat: Resource, stage: ScriptedNode, command_line: CommandLine
) -> None:
    stage.full = True
    await chat.create()
    pod = (await chat.until_pods("chat-0-0-0"))["chat-0-0-0"]
    await stage.find_no_place(pod, "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    await chat.until(lambda status: "Insufficient" in json.dumps(status), "Unschedulable")
    output = await command_line.ok("describe", "chat")
    assert "not Ready" in output
    assert "Unschedulable: chat-0-0-0 cannot start: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu." in output
    assert "replica group 0  Starting  0/1 pods ready, attempt 0, 0 of 5 restarts" in output
    assert "chat-0-0-0  Pending  leader, on no node yet" in output
    assert "AttemptStarted: replica group 0 starts attempt 0 on 1 pod(s)" in output
    assert "add nodes that fit" in output


async def test_describe_shows_the_progress_of_loading(
    chat: Resource, stage: ScriptedNode, command_line: CommandLine
) -> None:
    await chat.create()
    pod = (await chat.until_pods("chat-0-0-0"))["chat-0-0-0"]
    await stage.run(pod)
    await chat.until(lambda status: "10 %" in json.dumps(status), "the share of the weights")
    output = await command_line.ok("describe", "chat")
    assert "  ModelLoading: chat-0-0-0 loads the weights: 10 % of" in output.partition("Groups")[2]
    assert f"kubectl get mi chat -n {chat.namespace} --watch" in output


async def test_describe_shows_the_last_failure_and_the_address(
    chat: Resource, node: ScriptedNode, command_line: CommandLine
) -> None:
    await chat.create(failurePolicy={"backoff": "0.5s"})
    pods = await chat.until_pods("chat-0-0-0")
    await chat.until_phase("Running")
    words = {"reason": "RankFailed", "message": "CUDA error", "rank": 3, "exitCode": 1}
    await node.fail(pods["chat-0-0-0"], 1, words)
    await chat.until_pods("chat-0-1-0")
    await chat.until_phase("Running")
    output = await command_line.ok("describe", "chat")
    assert "ago: chat-0-0-0 rank 3 ended with exit code 1: RankFailed: CUDA error" in output
    assert f"curl http://chat.{chat.namespace}.svc:8000/v1/models" in output
    assert f"kubectl get --raw /api/v1/namespaces/{chat.namespace}/services/chat:http/proxy/v1/models" in output
    assert f"at {node.launchers['chat-0-1-0'].address}" in output
    assert "megatron-operator chat chat" in output


async def test_an_unknown_name_is_refused_with_similar_names(chat: Resource, command_line: CommandLine) -> None:
    await chat.create()
    for words in (("describe", "chatt"), ("logs", "chatt"), ("chat", "chatt"), ("pause", "chatt")):
        done = await command_line.run(*words)
        expected = f"error: MegatronInference chatt is not in namespace {chat.namespace}; did you mean chat?"
        assert (done.code, done.error_line) == (1, expected)
    done = await command_line.run("describe", "zebra")
    assert done.error_line.endswith(", which has: chat")


async def test_an_invalid_command_line_has_exit_code_2(command_line: CommandLine) -> None:
    done = await command_line.run("pause", "chat", "--timeout", "soon")
    assert (done.code, done.error_line[:6]) == (2, "error:")
    assert (await command_line.run("describe", "--outputt", "x")).code == 2


async def test_a_missing_permission_is_reported_in_one_line(installed: Cluster, chat: Resource) -> None:
    await chat.create()
    await chat.kubectl("create", "serviceaccount", "guest")
    stranger = CommandLine(installed.kubeconfig_for("guest", chat.namespace), chat.namespace)
    for words in (("describe", "chat"), ("logs", "chat"), ("stop", "chat")):
        done = await stranger.run(*words)
        assert done.code == 1
        assert done.error_line.startswith("error: not allowed: megatroninferences.inference.megatron.dev")
        assert "ask for a Role that grants it" in done.error_line


async def test_describe_works_without_permission_to_read_pods(installed: Cluster, chat: Resource) -> None:
    await chat.create()
    await chat.kubectl("create", "serviceaccount", "reader")
    await chat.kubectl("create", "role", "reader", "--verb=get", "--resource=megatroninferences")
    await chat.kubectl("create", "rolebinding", "r", "--role=reader", f"--serviceaccount={chat.namespace}:reader")
    reader = CommandLine(installed.kubeconfig_for("reader", chat.namespace), chat.namespace)
    output = await reader.ok("describe", "chat")
    assert "pods are not shown: pods is forbidden" in output
    assert "desired" in output


async def test_a_server_that_is_down_and_expired_credentials_are_reported_in_one_line(
    installed: Cluster, tmp_path: Path
) -> None:
    config = json.loads(installed.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
    cluster = config["clusters"][0]["cluster"]
    down, old = tmp_path / "down", tmp_path / "old"
    write_kubeconfig(down, "me", {**cluster, "server": f"https://127.0.0.1:{free_ports(1)[0]}"}, {"token": "x"})
    write_kubeconfig(old, "me", cluster, {"token": "x"})
    done = await CommandLine(down, "default").run("describe", "chat")
    assert done.code == 1
    assert "of context tests does not answer: " in done.error_line
    done = await CommandLine(old, "default").run("describe", "chat")
    assert done.code == 1
    assert "are wrong or have expired; log in again" in done.error_line


async def test_a_missing_kubeconfig_or_context_is_reported_in_one_line(installed: Cluster, tmp_path: Path) -> None:
    done = await CommandLine(tmp_path / "none", "default").run("describe", "chat")
    assert (done.code, "does not exist; set KUBECONFIG" in done.error_line) == (1, True)
    done = await CommandLine(installed.kubeconfig, "default").run("describe", "chat", "--context", "moon")
    assert (done.code, "moon" in done.error_line) == (1, True)
    broken = tmp_path / "broken"
    broken.write_text("a: [")
    done = await CommandLine(broken, "default").run("describe", "chat")
    assert (done.code, done.error_line.startswith(f"error: kubeconfig {broken}: ")) == (1, True)
