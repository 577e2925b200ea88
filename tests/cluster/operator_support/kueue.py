"""A stand-in for Kueue: the part of its integration of plain pods that the operator depends on.

A webhook adds the finalizer, the label and the scheduling gates to each new pod of the queue. A loop makes a Workload
of each complete group of pods, admits it within a quota of groups, and removes the finalizers when the group has ended
or its Workload is deleted, but not before: a group whose pods were deleted before they had a node has not ended.

API servers before 1.26 drop the gates, so the condition that later ones set on gated pods is written here, and the node
of the test asks which pods are admitted.
"""

import asyncio
import base64
import hashlib
import json
import ssl
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Self

import trustme
from aiohttp import web
from cluster_support.cluster import Cluster
from operator_support.api import Api, ApiFailure, Json
from operator_support.node import now
from operator_support.scripted_node import ScriptedNode

GROUP = "kueue.x-k8s.io"
QUEUE_LABEL, GROUP_LABEL, MANAGED = f"{GROUP}/queue-name", f"{GROUP}/pod-group-name", f"{GROUP}/managed"
COUNT, ROLE, RETRIABLE = f"{GROUP}/pod-group-total-count", f"{GROUP}/role-hash", f"{GROUP}/retriable-in-group"
TOPOLOGY = {"required": f"{GROUP}/podset-required-topology", "preferred": f"{GROUP}/podset-preferred-topology"}
SET_GROUP = f"{GROUP}/podset-group-name"
ADMISSION_GATE, TOPOLOGY_GATE = f"{GROUP}/admission", f"{GROUP}/topology"
IN_USE = f"{GROUP}/resource-in-use"
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
WORKLOADS = f"workloads.{GROUP}"
SHAPE = ("affinity", "nodeSelector", "resourceClaims", "tolerations", "topologySpreadConstraints")
ANY = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": WORKLOADS, "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"}},
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {"kind": "Workload", "plural": "workloads", "singular": "workload", "listKind": "WorkloadList"},
        "versions": [{"name": "v1beta2", "served": True, "storage": True, "schema": {"openAPIV3Schema": ANY}}],
    },
}


def install(cluster: Cluster) -> None:
    """Installs the kind Workload."""
    cluster.define(DEFINITION)


def remove(cluster: Cluster) -> None:
    cluster.kubectl("delete", "crd", WORKLOADS, "--timeout=30s")


class Kueue:
    """An asynchronous context manager: a LocalQueue in one namespace, with room for ``quota`` groups.

    The kind Workload has to be installed.
    """

    def __init__(self, api: Api, namespace: str, *, quota: int = 0) -> None:
        self.quota = quota
        self.name = f"team-{namespace}"
        self.problems: list[str] = []
        """Violations of Kueue's rules for groups of pods."""
        self._api = api
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._workloads = f"/apis/{GROUP}/v1beta2/namespaces/{namespace}/workloads"
        self._webhook = f"{WEBHOOKS}/kueue-{namespace}"
        self._admitted: set[str] = set()

    async def __aenter__(self) -> Self:
        await self._serve_webhook()
        self._task = asyncio.create_task(self._turns())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._api.delete(self._webhook)
        await self._runner.cleanup()
        for pod in await self._queued_pods():
            await self._finalize(pod)
        for workload in await self.workloads():
            await self._api.merge(f"{self._workloads}/{workload['metadata']['name']}", _without_finalizers())
        assert not self.problems

    async def workloads(self) -> list[Json]:
        """The Workloads, in the order of their creation."""
        return sorted(await self._api.items(self._workloads), key=lambda each: each["metadata"]["creationTimestamp"])

    def is_admitted(self, pod: Json) -> bool:
        """Whether the scheduler may see the pod."""
        return pod["metadata"]["labels"].get(GROUP_LABEL) in self._admitted

    async def evict(self, group: str, message: str) -> None:
        """Ends the pods of an admitted group, such as for a group with a higher priority."""
        self._admitted.remove(group)
        target = {"type": "TerminationTarget", "status": "True", "lastTransitionTime": now()[:19] + "Z"}
        for pod in await self._queued_pods():
            if pod["metadata"]["labels"][GROUP_LABEL] == group:
                path = f"{self._pods}/{pod['metadata']['name']}"
                others = pod["status"].get("conditions") or []
                conditions = [*others, {**target, "reason": "Preempted", "message": message}]
                await self._api.merge(f"{path}/status", {"status": {"conditions": conditions}})
                await self._api.delete(path)

    # --- the webhook

    async def _serve_webhook(self) -> None:
        authority = trustme.CA()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        application = web.Application(client_max_size=2**22)
        application.router.add_post("/", self._mutate)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context).start()
        url = f"https://127.0.0.1:{self._runner.addresses[0][1]}/"
        bundle = base64.b64encode(authority.cert_pem.bytes()).decode()
        hook = {
            "name": "pods.kueue.test",
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "clientConfig": {"url": url, "caBundle": bundle},
            "objectSelector": {"matchLabels": {QUEUE_LABEL: self.name}},
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        }
        metadata = {"name": self._webhook.rpartition("/")[2]}
        kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration"}
        await self._api.post(WEBHOOKS, {**kind, "metadata": metadata, "webhooks": [hook]})
        probe = {
            "metadata": {"name": "probe", "labels": {QUEUE_LABEL: self.name}, "annotations": {COUNT: "1"}},
            "spec": {"containers": [{"name": "probe", "image": "probe"}]},
        }
        # The API server reads the configuration some time later.
        while MANAGED not in (await self._api.post(f"{self._pods}?dryRun=All", probe))["metadata"]["labels"]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    async def _mutate(self, request: web.Request) -> web.Response:
        asked = (await request.json())["request"]
        pod = asked["object"]
        gates = [ADMISSION_GATE, *([TOPOLOGY_GATE] if _topology(pod) else [])]
        added = {
            "/metadata/finalizers": [MANAGED],
            f"/metadata/labels/{MANAGED.replace('/', '~1')}": "true",
            f"/metadata/annotations/{ROLE.replace('/', '~1')}": _role(pod["spec"]),
            "/spec/schedulingGates": [{"name": gate} for gate in gates],
        }
        patch = json.dumps([{"op": "add", "path": path, "value": value} for path, value in added.items()])
        answer = {"uid": asked["uid"], "allowed": True, "patchType": "JSONPatch"}
        response = {**answer, "patch": base64.b64encode(patch.encode()).decode()}
        return web.json_response({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response})

    # --- the controller

    async def _turns(self) -> None:
        while True:
            try:
                await self._turn()
            except ApiFailure:
                pass  # a race with a deletion
            except Exception as error:
                self.problems.append(repr(error))
                raise
            await asyncio.sleep(0.1)

    async def _turn(self) -> None:
        groups: dict[str, list[Json]] = defaultdict(list)
        for pod in await self._queued_pods():
            groups[pod["metadata"]["labels"][GROUP_LABEL]].append(pod)
        workloads = {each["metadata"]["name"]: each for each in await self.workloads()}
        self._admitted &= groups.keys()
        for name in workloads.keys() - groups.keys():
            await self._end_workload(name)
        for name, pods in groups.items():
            await self._follow(name, pods, workloads.get(name))

    async def _follow(self, name: str, pods: Sequence[Json], workload: Json | None) -> None:
        runnable = [pod for pod in pods if _is_runnable(pod)]
        if workload is None:
            for pod in pods:
                if pod not in runnable:
                    await self._finalize(pod)
            await self._compose(name, runnable)
        elif workload["metadata"].get("deletionTimestamp") or _has_ended(pods):
            for pod in pods:
                if not _has_ended([pod]):
                    await self._api.delete(f"{self._pods}/{pod['metadata']['name']}")
                await self._finalize(pod)
            if workload["metadata"].get("deletionTimestamp"):
                await self._end_workload(name)
        elif name in self._admitted or (len(runnable) == _count(pods[0]) and len(self._admitted) < self.quota):
            self._admitted.add(name)
            for pod in runnable:
                await self._ungate(pod)
        for pod in pods:
            await self._report_gate(pod)

    async def _compose(self, name: str, pods: Sequence[Json]) -> None:
        """Makes the Workload of a complete group."""
        counts = {_count(pod) for pod in pods}
        if len(counts) > 1 or (counts and len(pods) > max(counts)):
            self.problems.append(f"{name} has {len(pods)} pods with the total counts {sorted(counts)}")
        if counts != {len(pods)}:
            return
        sets: dict[str, list[Json]] = defaultdict(list)
        for pod in pods:
            sets[pod["metadata"]["annotations"][ROLE]].append(pod)
        listed = [
            {"name": role, "count": len(each), "topologyRequest": _topology(each[0])} for role, each in sets.items()
        ]
        owners = [{"apiVersion": "v1", "kind": "Pod", **_name_and_uid(pod)} for pod in pods]
        metadata = {"name": name, "finalizers": [IN_USE], "ownerReferences": owners}
        spec = {"queueName": self.name, "podSets": listed}
        kind = {"apiVersion": f"{GROUP}/v1beta2", "kind": "Workload"}
        await self._api.post(self._workloads, {**kind, "metadata": metadata, "spec": spec})

    async def _end_workload(self, name: str) -> None:
        self._admitted.discard(name)
        await self._api.delete(f"{self._workloads}/{name}")
        await self._api.merge(f"{self._workloads}/{name}", _without_finalizers())

    async def _ungate(self, pod: Json) -> None:
        if pod["spec"].get("schedulingGates"):
            await self._api.merge(f"{self._pods}/{pod['metadata']['name']}", {"spec": {"schedulingGates": None}})

    async def _report_gate(self, pod: Json) -> None:
        """Writes the condition of a gated pod where the API server does not know gates."""
        conditions = pod["status"].get("conditions") or []
        is_gated = not self.is_admitted(pod) and not pod["spec"].get("nodeName")
        if "schedulingGates" not in pod["spec"] and is_gated != bool(conditions) and not pod["spec"].get("nodeName"):
            words = {"reason": "SchedulingGated", "message": "Scheduling is blocked due to non-empty scheduling gates"}
            gated = [{"type": "PodScheduled", "status": "False", **words}] if is_gated else []
            # The node may report the pod's status meanwhile; the version prevents that its conditions are overwritten.
            seen = {"metadata": {"resourceVersion": pod["metadata"]["resourceVersion"]}}
            path = f"{self._pods}/{pod['metadata']['name']}/status"
            await self._api.merge(path, seen | {"status": {"conditions": gated}})

    async def _finalize(self, pod: Json) -> None:
        if pod["metadata"].get("finalizers"):
            await self._api.merge(f"{self._pods}/{pod['metadata']['name']}", _without_finalizers())

    async def _queued_pods(self) -> list[Json]:
        pods = await self._api.items(self._pods)
        return [pod for pod in pods if MANAGED in pod["metadata"].get("labels", {})]


class QueuedNode(ScriptedNode):
    """A node for the pods that Kueue has admitted. A pod that ends there has a final phase, as kubelets report it."""

    def __init__(self, api: Api, namespace: str, is_admitted: Callable[[Json], bool]) -> None:
        super().__init__(api, namespace)
        self._is_admitted = is_admitted

    def fits(self, pod: Json) -> bool:
        return self._is_admitted(pod)

    async def stop(self, pod: Json, grace_seconds: float) -> None:
        await super().stop(pod, grace_seconds)
        if pod["spec"].get("nodeName"):
            await self.report(pod, {"phase": "Succeeded"})


def _without_finalizers() -> Json:
    return {"metadata": {"finalizers": None}}


def _name_and_uid(obj: Json) -> Json:
    return {key: obj["metadata"][key] for key in ("name", "uid")}


def _count(pod: Json) -> int:
    return int(pod["metadata"]["annotations"][COUNT])


def _topology(pod: Json) -> Json:
    annotations = pod["metadata"].get("annotations") or {}
    found = {kind: annotations[key] for kind, key in TOPOLOGY.items() if key in annotations}
    return found | ({"podSetGroupName": annotations[SET_GROUP]} if found and SET_GROUP in annotations else {})


def _role(spec: Json) -> str:
    """Pods with the same fields that matter for their admission are one set."""
    containers = [{key: each.get(key) for key in ("resources", "ports")} for each in spec["containers"]]
    shape: dict[str, Any] = {"containers": containers, **{key: spec.get(key) for key in SHAPE}}
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:8]


def _is_runnable(pod: Json) -> bool:
    is_lost = "deletionTimestamp" in pod["metadata"] and not pod["spec"].get("nodeName")
    return not is_lost and pod["status"].get("phase") != "Failed"


def _has_ended(pods: Sequence[Json]) -> bool:
    """Whether all pods have a final phase, and none of them asks for replacements."""
    is_final = all(pod["status"].get("phase") in ("Succeeded", "Failed") for pod in pods)
    return is_final and any(pod["metadata"]["annotations"].get(RETRIABLE) == "false" for pod in pods)
