"""`kubectl delete --cascade=orphan`, and a new resource of the same name."""

import pytest
from operator_support.resource import Resource

pytestmark = pytest.mark.usefixtures("node")

CHILDREN = ("pods", "services", "secrets", "ingress")


async def owners(chat: Resource) -> set[str]:
    """The uids of the owners of all children."""
    found: set[str] = set()
    for kind in CHILDREN:
        listed = await chat.look(kind) or {}
        found |= {owner["uid"] for each in listed["items"] for owner in each["metadata"].get("ownerReferences", [])}
    return found


async def test_pods_that_a_deleted_resource_left_serve_on_under_a_new_one_of_the_same_name(chat: Resource) -> None:
    spec = {"replicas": 2, "expose": {"ingress": {"host": "chat.example.com"}}}
    await chat.create(**spec)
    await chat.until(lambda status: status.get("ready") == "2/2", "both groups")
    before, former = await chat.pods(), await owners(chat)
    await chat.kubectl("delete", "mi", "chat", "--cascade=orphan", "--timeout=60s")
    assert await owners(chat) == set()
    await chat.create(**spec)
    await chat.until(lambda status: status.get("ready") == "2/2", "both groups again")
    created = await chat.get("mi", "chat")
    # The operator may not change Secrets.
    listed = [each for kind in CHILDREN if kind != "secrets" for each in (await chat.look(kind) or {})["items"]]
    assert (
        {owner["uid"] for each in listed for owner in each["metadata"]["ownerReferences"]}
        == {created["metadata"]["uid"]}
        != former
    )
    after = await chat.pods()
    assert {name: pod["metadata"]["uid"] for name, pod in after.items()} == {
        name: pod["metadata"]["uid"] for name, pod in before.items()
    }
    assert not any("deletionTimestamp" in pod["metadata"] for pod in after.values())
    await chat.patch({"lifecycle": "Stopped"})
    await chat.until_pods()


async def test_another_resource_of_the_same_name_does_not_take_the_service_of_a_stranger(chat: Resource) -> None:
    await chat.kubectl("create", "service", "clusterip", "chat", "--tcp=8000")
    await chat.create()
    await chat.until(lambda status: "NameTaken" in str(status), "the refusal")
    assert await chat.pods() == {}
