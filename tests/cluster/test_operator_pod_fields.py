"""Fields of the resource about pods and Services, as an API server stores or refuses them."""

import json
from collections.abc import AsyncIterator

import pytest
from operator_support.resource import Json, Resource, condition
from suite_support.kubernetes_schemas import check

pytestmark = pytest.mark.usefixtures("node")

RUNTIME_CLASS: Json = {
    "apiVersion": "node.k8s.io/v1",
    "kind": "RuntimeClass",
    "metadata": {"name": "fast"},
    "handler": "runc",
}
SPEC: Json = {
    "pods": {
        "device": "cpu",
        "resources": {"requests": {"cpu": 2, "memory": "3Gi"}, "limits": {"rdma/hca": 1, "memory": "4Gi"}},
        "runtimeClassName": "fast",
        "hostNetwork": True,
    },
    "scheduling": {
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}, {"key": "a", "value": "b", "effect": "NoSchedule"}],
    },
    "expose": {
        "service": {"type": "LoadBalancer", "annotations": {"example.com/internal": "true"}},
        "clientsFrom": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}],
    },
}


@pytest.fixture
async def runtime_class(chat: Resource) -> AsyncIterator[None]:
    await chat.kubectl("apply", "-f", "-", input=json.dumps(RUNTIME_CLASS))
    yield
    await chat.kubectl("delete", "runtimeclass", RUNTIME_CLASS["metadata"]["name"])


@pytest.mark.usefixtures("runtime_class")
async def test_the_fields_are_those_of_the_stored_pod_and_service(chat: Resource) -> None:
    await chat.create(**SPEC)
    await chat.until_phase("Running")
    (pod,) = (await chat.pods()).values()
    check({"apiVersion": "v1", "kind": "Pod", **pod})
    spec = pod["spec"]
    assert spec["containers"][0]["resources"] == {
        "requests": {"cpu": "2", "memory": "3Gi", "rdma/hca": "1"},
        "limits": {"rdma/hca": "1", "memory": "4Gi"},
    }
    assert (spec["runtimeClassName"], spec["hostNetwork"], spec["dnsPolicy"]) == (
        "fast",
        True,
        "ClusterFirstWithHostNet",
    )
    assert spec["nodeSelector"] == {"disk": "ssd"}
    assert [each for each in spec["tolerations"] if each.get("key") in ("gpu", "a")] == [
        {"key": "gpu", "operator": "Exists"},
        {"key": "a", "operator": "Equal", "value": "b", "effect": "NoSchedule"},
    ]
    service = await chat.look("service", "chat")
    assert service is not None
    assert service["metadata"]["annotations"]["example.com/internal"] == "true"


async def test_an_annotation_that_is_removed_leaves_the_service_and_other_annotations(chat: Resource) -> None:
    def annotations(service: Json) -> set[str]:
        return {key for key in service["metadata"].get("annotations", {}) if key.startswith("example.com/")}

    await chat.create(expose=SPEC["expose"])
    await chat.until_phase("Running")
    await chat.kubectl("annotate", "service", "chat", "example.com/of-the-cloud=1")
    pods = await chat.pods()
    await chat.patch({"expose": {"service": {"annotations": {"example.com/internal": None}}}})
    await chat.until_found("service", "chat", lambda found: annotations(found) == {"example.com/of-the-cloud"})
    assert (await chat.pods()).keys() == pods.keys()


async def test_resources_that_only_the_api_server_can_refuse_are_refused_before_any_pod_is_replaced(
    chat: Resource,
) -> None:
    await chat.create()
    await chat.until_phase("Running")
    pods = await chat.pods()
    await chat.patch({"pods": {"resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}}})
    message = condition(await chat.until_phase("Failed"), "Failed")["message"]
    assert message.startswith("spec.pods: ")
    assert "must be less than or equal to memory limit" in message
    assert (await chat.pods()).keys() == pods.keys()
