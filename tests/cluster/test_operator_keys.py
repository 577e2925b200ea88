"""The keys that the pods of a resource share with the operator."""

import asyncio
import json

import pytest
from operator_support.operator_process import OperatorProcess
from operator_support.resource import Json, Resource, condition
from operator_support.scripted_node import ScriptedNode
from suite_support.console_runs import documented
from suite_support.doc_shell import DocShell


async def keys(chat: Resource) -> dict[str, str]:
    data: dict[str, str] = (await chat.get("secret", "chat-keys"))["data"]
    return data


@pytest.mark.usefixtures("operator")
async def test_a_deleted_secret_is_replaced_with_new_keys_and_new_pods(
    chat: Resource, node: ScriptedNode, reader: DocShell
) -> None:
    await chat.create(replicas=2)
    await chat.until_phase("Running")
    before = await keys(chat)
    for step in documented("docs/security.md", "kubectl delete secret chat-keys"):
        await asyncio.to_thread(reader.run, step.command)
    await chat.until_pods("chat-0-1-0", "chat-1-1-0")
    status = await chat.until(lambda status: status.get("ready") == "2/2", "both groups")
    after = await keys(chat)
    assert {name for name in before if before[name] != after[name]} == {"coordinator-key", "control-token"}
    assert (status["phase"], status["restarts"]) == ("Running", 0)
    # The launcher accepts only the token of the new Secret, so the operator uses it.
    assert set(node.launchers) == {"chat-0-1-0", "chat-1-1-0"}
    events = [event["reason"] for event in await chat.events("RotatingKeys")]
    assert events.count("RotatingKeys") == 1


@pytest.mark.usefixtures("node")
async def test_a_secret_that_another_client_creates_in_its_place_ends_no_pod(
    chat: Resource, operator: OperatorProcess
) -> None:
    await chat.create()
    await chat.until_phase("Running")
    (before,) = (await chat.pods()).values()
    secret = await chat.get("secret", "chat-keys")
    del secret["metadata"]["ownerReferences"], secret["metadata"]["labels"]
    # kubectl deletes and creates. A round in between would end the pods, as after a deletion alone.
    operator.halt()
    try:
        await chat.kubectl("replace", "--force", "-f", "-", input=json.dumps(secret))
    finally:
        operator.go_on()
    await chat.kubectl("annotate", "mi", "chat", "tests/keys=replaced")
    status = await chat.until(lambda status: "another owner" in message_of(status, "Degraded"), "the complaint")
    assert "Secret chat-keys exists and has another owner" in message_of(status, "Degraded")
    (after,) = (await chat.pods()).values()
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert "deletionTimestamp" not in after["metadata"]


def message_of(status: Json, kind: str) -> str:
    return str(condition(status, kind).get("message"))
