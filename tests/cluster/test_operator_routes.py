"""The Ingress of a resource: created, changed and deleted with its field, and restored after changes of other
clients."""

import json

import pytest
from operator_support.resource import Json, Resource
from operator_support.scripted_node import ScriptedNode

ANNOTATION = "nginx.ingress.kubernetes.io/proxy-read-timeout"
INGRESS = {
    "className": "nginx",
    "host": "chat.example.com",
    "tlsSecret": "chat-tls",
    "annotations": {ANNOTATION: "3600"},
}


def host_of(ingress: Json) -> str:
    return str(ingress["spec"]["rules"][0].get("host"))


@pytest.mark.usefixtures("node")
async def test_an_ingress_is_created_changed_and_deleted_with_its_field_while_the_pods_stay(chat: Resource) -> None:
    await chat.create(expose={"ingress": INGRESS})
    await chat.until_phase("Running")
    before = await chat.pods()
    ingress = await chat.until_found("ingress", "chat", lambda _: True)
    assert (host_of(ingress), ingress["spec"]["ingressClassName"]) == ("chat.example.com", "nginx")
    assert ingress["spec"]["tls"] == [{"hosts": ["chat.example.com"], "secretName": "chat-tls"}]
    assert ingress["metadata"]["annotations"][ANNOTATION] == "3600"
    backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": "chat", "port": {"number": 8000}}
    await chat.patch({"expose": {"ingress": {"host": "other.example.com", "tlsSecret": None, "annotations": None}}})
    ingress = await chat.until_found("ingress", "chat", lambda ingress: host_of(ingress) == "other.example.com")
    assert ("tls" in ingress["spec"], ANNOTATION in ingress["metadata"]["annotations"]) == (False, False)
    await chat.patch({"expose": {"ingress": None}})
    await chat.until_gone("ingresses")
    assert {name: pod["metadata"]["uid"] for name, pod in (await chat.pods()).items()} == {
        name: pod["metadata"]["uid"] for name, pod in before.items()
    }


@pytest.mark.usefixtures("node")
async def test_an_ingress_that_a_user_edits_or_deletes_is_restored(chat: Resource) -> None:
    await chat.create(expose={"ingress": INGRESS})
    await chat.until_phase("Running")
    made = await chat.until_found("ingress", "chat", lambda _: True)
    patch = [{"op": "replace", "path": "/spec/rules/0/host", "value": "wrong.example.com"}]
    await chat.kubectl("patch", "ingress", "chat", "--type=json", "-p", json.dumps(patch))
    await chat.until_found("ingress", "chat", lambda ingress: host_of(ingress) == "chat.example.com")
    await chat.kubectl("delete", "ingress", "chat")
    again = await chat.until_found("ingress", "chat", lambda _: True)
    assert again["metadata"]["uid"] != made["metadata"]["uid"]


async def test_an_ingress_of_another_owner_is_never_adopted_and_pods_serve(chat: Resource, node: ScriptedNode) -> None:
    backend = {"service": {"name": "shop", "port": {"number": 80}}}
    stranger = {"apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "metadata": {"name": "chat"}}
    await chat.apply({**stranger, "spec": {"defaultBackend": backend}})
    await chat.create(expose={"ingress": INGRESS})
    status = await chat.until_phase("Running")
    words = "Ingress chat exists and has another owner"
    assert words in json.dumps(status["conditions"])
    assert (await chat.get("ingress", "chat"))["spec"] == {"defaultBackend": backend}
    assert set(node.launchers) == {"chat-0-0-0"}


@pytest.mark.usefixtures("node", "controllers")
async def test_the_ingress_is_deleted_with_its_resource(chat: Resource) -> None:
    await chat.create(expose={"ingress": INGRESS})
    await chat.until_phase("Running")
    await chat.kubectl("delete", "mi", "chat", "--timeout=60s")
    await chat.until_gone("ingresses", "pods")
