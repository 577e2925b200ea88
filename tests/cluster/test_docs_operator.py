"""The commands of the docs for a resource that an operator serves, as a reader pastes them."""

import asyncio
import base64
import json
import re
from pathlib import Path

import pytest
from cluster_support.cluster import wait_until
from operator_support.api import Api
from operator_support.chat_endpoint import ChatEndpoint, own_address
from operator_support.kubelet_logs import KubeletLogs
from operator_support.resource import Resource
from operator_support.scripted_node import ScriptedNode
from suite_support.console_runs import documented
from suite_support.doc_shell import DocShell


@pytest.mark.usefixtures("node", "controllers")
async def test_a_resource_is_inspected_and_suspended_as_in_the_docs(chat: Resource, reader: DocShell) -> None:
    await chat.create(replicas=2)
    await chat.until(lambda status: status.get("ready") == "2/2", "both groups")
    await chat.events("AttemptStarted")
    inspection = documented("docs/operations.md", "kubectl get mi -A")
    listed, described, explained, events = [await asyncio.to_thread(reader.run, step.command) for step in inspection]
    assert re.search(rf"^{chat.namespace} +chat +Running +RUNNING +2/2 ", listed, re.M)
    assert re.search(r"Type: +Ready$", described, re.M)
    assert "chat-1-0-0" in explained
    assert "AttemptStarted" in events
    patch, wait = documented("docs/lifecycle.md", "kubectl patch mi chat")
    await asyncio.to_thread(reader.run, patch.command)
    assert "chat condition met" in await asyncio.to_thread(reader.run, wait.command)
    (delete,) = documented("docs/operations.md", "kubectl delete poddisruptionbudgets")
    assert '"chat" deleted' in await asyncio.to_thread(reader.run, delete.command)


def test_secrets_are_created_as_in_the_docs(reader: DocShell) -> None:
    reader.write("key.json", "{}")
    of_the_hub = documented("docs/examples.md", "kubectl create secret generic hub")
    of_buckets = documented("docs/examples.md", "kubectl create secret generic bucket")
    for step in (*of_the_hub, *of_buckets):
        reader.run(step.command)
    names = ("hub", "users", "bucket", "bucket-of-google")
    found = [json.loads(reader.run(f"kubectl get secret {name} -o json"))["data"] for name in names]
    assert [set(data) for data in found] == [
        {"token"},
        {"api-keys"},
        {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"},
        {"GOOGLE_SERVICE_ACCOUNT_KEY"},
    ]
    assert base64.b64decode(found[3]["GOOGLE_SERVICE_ACCOUNT_KEY"]) == b"{}"


@pytest.mark.usefixtures("controllers")
async def test_the_plugin_runs_as_in_the_docs(chat: Resource, api: Api, reader: DocShell, tmp_path: Path) -> None:
    describe, ask, logs, suspend, doctor = documented("README.md", "kubectl megatron describe")
    again = documented("docs/command-line.md", "kubectl megatron describe")
    assert [step.words for step in again] == [step.words for step in (describe, ask, logs, suspend, doctor)]
    model, address, log = Resource(chat.cluster, chat.namespace, "smollm2"), own_address(), tmp_path / "log"
    async with (
        ScriptedNode(api, chat.namespace, address=address) as node,
        KubeletLogs(api, node.name) as kubelet,
        ChatEndpoint(address),
    ):
        await model.create()
        await model.until_phase("Running")
        await model.until_found("endpoints", "smollm2", lambda found: address in str(found.get("subsets")))
        described = await asyncio.to_thread(reader.run, describe.command)
        assert f"{chat.namespace}/smollm2  Running" in described
        assert f"kubectl megatron chat smollm2 -n {chat.namespace}" in described
        for verb, of in ((" pause", "[OPTIONS] "), ("", "[OPTIONS] COMMAND")):
            usage = await asyncio.to_thread(reader.run, f"kubectl megatron{verb} --help")
            assert f"Usage: kubectl megatron{verb} {of}" in usage
        assert await asyncio.to_thread(reader.run, ask.command) == "You said: WhatisthecapitalofFrance?\n"
        await kubelet.write("smollm2-0-0-0", ("10:00:01", "launcher begins"), ("10:00:03", "[rank 0] a"))
        with reader.running(logs.command, log):
            await asyncio.to_thread(wait_until, lambda: "[rank 0] a" in log.read_text(), "the log")
        assert "smollm2 is Suspended" in await asyncio.to_thread(reader.run, suspend.command)
        assert "the cluster has no Deployment of it" in await asyncio.to_thread(reader.run, doctor.command, code=1)
