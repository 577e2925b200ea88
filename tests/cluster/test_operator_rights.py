"""The operator's role has exactly the permissions that it uses."""

import asyncio
import json
from collections.abc import Sequence

from chart_support.helm import NAMESPACE, Object
from chart_support.release import NAME, Release
from cluster_support import audit
from cluster_support.audit import Request, Right
from cluster_support.control_plane import ControlPlane
from operator_support import gang_api, gateway_api, inference_extension, kueue
from operator_support.api import Api
from operator_support.resource import Resource, reason
from operator_support.scripted_node import ScriptedNode

from megatron_operator import names

BEFORE_1_36 = {
    names.SCHEDULER_PLUGINS_POD_GROUP: "SchedulerPlugins",
    names.VOLCANO_POD_GROUP: "Volcano",
    names.WORKLOAD: "Auto",
}
OURS = "inference.megatron.dev"
ASKED_ON_THE_WAY = {
    # Server-side apply is a patch; if the object does not exist, the API server also requires create.
    Right("", "services", "create"),
    Right("networking.k8s.io", "networkpolicies", "create"),
    Right("networking.k8s.io", "ingresses", "create"),
    Right("gateway.networking.k8s.io", "httproutes", "create"),
    Right("inference.networking.k8s.io", "inferencepools", "create"),
    Right("policy", "poddisruptionbudgets", "create"),
    Right("", "persistentvolumeclaims", "create"),
    *(Right(kind.partition(".")[2], f"{kind.partition('.')[0].lower()}s", "create") for kind in names.GANG_KINDS),
    # Required to set an ownerReference that blocks deletion, with OwnerReferencesPermissionEnforcement.
    Right(OURS, "megatroninferences/finalizers", "update"),
}
"""Permissions without requests of their own: the API server checks them for other requests."""


def granted(rules: Sequence[Object]) -> set[Right]:
    return {
        Right(group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


ROUTES = {
    "ingress": {},
    "httpRoute": {"parentRefs": [{"name": "public"}]},
    "inferencePool": {"endpointPicker": {"name": "picker"}},
}


async def begin_with_a_name_that_is_taken(chat: Resource) -> None:
    on_another_node = '--overrides={"spec": {"nodeName": "elsewhere"}}'
    await chat.kubectl("run", "chat-0-0-0", "--image=of-another-client", on_another_node)
    await chat.create(replicas=2, expose=ROUTES)
    await chat.until(lambda status: "has another owner" in json.dumps(status), "the name that is taken")
    await chat.kubectl("delete", "pod", "chat-0-0-0", "--force", "--grace-period=0")
    await chat.kubectl("annotate", "mi", "chat", "tests/look=again")


async def run_lifecycle(chat: Resource, node: ScriptedNode) -> None:
    """Triggers all other requests of the operator."""
    await chat.until_phase("Running")
    for kind in ("service", "networkpolicy", "ingress", gateway_api.NAME, inference_extension.NAME):
        await chat.kubectl("delete", kind, "chat")
        await chat.until_found(kind, "chat", lambda _: True)
    await chat.patch({"expose": dict.fromkeys(ROUTES)})
    await chat.until_gone("ingresses", gateway_api.NAME, inference_extension.NAME)
    await node.fail((await chat.pods())["chat-0-0-0"], 1, "a rank died")
    await chat.until(lambda status: status["leader"]["pod"] == "chat-1-0-0", "another leader")
    await chat.kubectl("scale", "mi", "chat", "--replicas=1")
    await chat.until_pods("chat-0-1-0")
    await chat.kubectl("patch", "mi", "chat", "--type=merge", "-p", '{"spec": {"lifecycle": "Paused"}}')
    await chat.until_phase("Paused")


async def run_gang(cluster: ControlPlane, gang: str, kind: str) -> None:
    """Creates and deletes the gang object of a group of two pods."""
    model = Resource(cluster, cluster.make_namespace())
    async with Api(cluster.kubeconfig) as api, ScriptedNode(api, model.namespace):
        await model.create(scheduling={"gang": gang}, parallelism={"tensor": 2})
        await model.until_phase("Running")
        await model.patch({"lifecycle": "Stopped"})
        while (await model.get(gang_api.plural(kind)))["items"]:  # noqa: ASYNC110  # nothing reports it
            await asyncio.sleep(0.2)
        await model.kubectl("delete", "mi", "chat")


async def run_model_cache(cluster: ControlPlane) -> None:
    """Fills caches in claims and on nodes; a Job whose name is taken is one of a deleted resource of the name."""
    model = Resource(cluster, cluster.make_namespace())
    hub = {"huggingFace": {"repo": "owner/model"}}
    async with Api(cluster.kubeconfig) as api, ScriptedNode(api, model.namespace) as node:
        await model.create(model={"source": hub, "cache": {"volumeClaim": {"size": "1Gi"}}})
        await model.until_phase("Running")
        selected = {"path": "/m", "nodeSelector": {"kubernetes.io/hostname": node.name}}
        await model.kubectl("label", "node", node.name, f"kubernetes.io/hostname={node.name}")
        await model.patch({"model": {"cache": {"volumeClaim": None, "hostPath": selected}}})
        await model.until(lambda status: status["cache"].get("filledNodes") == 1, "the cache of the node")
        while await model.kubectl("get", "pvc", "-o", "name"):  # noqa: ASYNC110  # nothing reports it
            await asyncio.sleep(0.2)
        await model.kubectl("delete", "mi", "chat")


async def run_queue(cluster: ControlPlane) -> None:
    """Stops a resource that waits in a queue."""
    model = Resource(cluster, cluster.make_namespace())
    async with Api(cluster.kubeconfig) as api, kueue.Kueue(api, model.namespace) as queue:
        await model.create(scheduling={"queueName": queue.name})
        await model.until(lambda status: reason(status) == "SchedulingGated", "the queue")
        await model.patch({"lifecycle": "Stopped"})
        await model.until_pods()
        await model.kubectl("delete", "mi", "chat")


async def record(release: Release, control_plane: ControlPlane) -> list[Request]:
    release.install()
    gateway_api.install(control_plane)
    inference_extension.install(control_plane)
    kueue.install(control_plane)
    for kind in BEFORE_1_36:
        gang_api.install(control_plane, kind)
    chat = Resource(control_plane, control_plane.make_namespace())
    async with Api(control_plane.kubeconfig) as api:
        with release.operator():
            await begin_with_a_name_that_is_taken(chat)
            async with ScriptedNode(api, chat.namespace) as node:
                await run_lifecycle(chat, node)
            await asyncio.gather(*(run_gang(control_plane, gang, kind) for kind, gang in BEFORE_1_36.items()))
            await run_model_cache(control_plane)
            await run_queue(control_plane)
        gang_api.install(control_plane, names.POD_GROUP)
        release.upgrade("--set=networkPolicy.enabled=false")
        with release.operator():
            await chat.until_gone("networkpolicies")
            await run_gang(control_plane, "Auto", names.POD_GROUP)
    return list(audit.requests_of(control_plane.logs, NAME, NAMESPACE))


async def test_the_role_has_exactly_the_permissions_that_are_used(
    release: Release, bare_control_plane: ControlPlane
) -> None:
    requests = await record(release, bare_control_plane)
    assert [request for request in requests if request.status == 403] == []
    used = {request.right for request in requests}
    own = bare_control_plane.get("role", f"{NAME}-lease", "-n", NAMESPACE)
    rights = granted([*bare_control_plane.get("clusterrole", NAME)["rules"], *own["rules"]])
    assert (sorted(used - rights), sorted(rights - used)) == ([], sorted(ASKED_ON_THE_WAY))
    assert all(
        request.name for request in requests if request.right.resource == "secrets" and request.right.verb == "get"
    )


async def test_services_cannot_be_created_without_the_permission(
    release: Release, bare_control_plane: ControlPlane
) -> None:
    release.install()
    role = bare_control_plane.get("clusterrole", NAME)
    for rule in role["rules"]:
        if rule["resources"] == ["services"]:
            rule["verbs"].remove("create")
    await asyncio.to_thread(lambda: bare_control_plane.kubectl("replace", "-f", "-", input=json.dumps(role)))
    chat = Resource(bare_control_plane, bare_control_plane.make_namespace())
    with release.operator():
        await chat.create()
        await chat.until(lambda status: "is forbidden" in json.dumps(status), "the refusal in the status")
