"""A MegatronInference and the objects of its namespace."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

from cluster_support.cluster import Cluster
from cluster_support.errors import NotReadyError
from operator_support import gang_api
from operator_support.api import MERGE

from megatron_operator import names

Json = dict[str, Any]
T = TypeVar("T")
CORE, NETWORKING, GATEWAY = "/api/v1", "/apis/networking.k8s.io/v1", "/apis/gateway.networking.k8s.io/v1"
INFERENCE = "/apis/inference.networking.k8s.io/v1"
KINDS = (
    (CORE, "endpoints", "endpoints"),
    (CORE, "event", "events"),
    (CORE, "persistentvolumeclaim", "persistentvolumeclaims"),
    (CORE, "pod", "pods"),
    (CORE, "secret", "secrets"),
    (CORE, "service", "services"),
    (GATEWAY, "httproutes.gateway.networking.k8s.io", "httproutes"),
    (INFERENCE, "inferencepools.inference.networking.k8s.io", "inferencepools"),
    ("/apis/batch/v1", "job", "jobs"),
    (NETWORKING, "ingress", "ingresses"),
    (NETWORKING, "networkpolicy", "networkpolicies"),
    ("/apis/inference.megatron.dev/v1alpha1", "mi", "megatroninferences"),
)
GANG_KINDS = [(f"/apis/{version}", gang_api.plural(kind)) for kind, version in names.GANG_KINDS.items()]
PATHS = {
    **{word: (prefix, plural) for prefix, singular, plural in KINDS for word in (singular, plural)},
    **{word: (prefix, word.partition(".")[0]) for prefix, word in GANG_KINDS},
}
"""Paths of the API server by kubectl's names of kinds."""


def manifest(name: str = "chat", **spec: Any) -> Json:
    """A resource with one CPU rank and a model path; ``spec`` is added."""
    return {
        "apiVersion": "inference.megatron.dev/v1alpha1",
        "kind": "MegatronInference",
        "metadata": {"name": name},
        "spec": {"model": {"source": {"path": "/models/m.gguf"}}, "pods": {"device": "cpu"}, **spec},
    }


class Resource:
    """One resource of a namespace, whether it exists or not."""

    def __init__(self, cluster: Cluster, namespace: str, name: str = "chat") -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.name = name

    async def kubectl(self, *args: str, input: str | None = None) -> str:
        words = ("-n", self.namespace, *args)
        return await asyncio.to_thread(lambda: self.cluster.kubectl(*words, input=input))

    async def apply(self, resource: Mapping[str, Any]) -> None:
        await self.kubectl("apply", "-f", "-", input=json.dumps(resource))

    async def create(self, **spec: Any) -> None:
        """Creates it by a request, which takes a tenth of the processor time of a kubectl process."""
        body = manifest(self.name, **spec)
        await self._request("POST", f"{self._path('mi')}?fieldValidation=Strict", body)

    async def patch(self, spec: Mapping[str, Any]) -> None:
        """Merges into its spec."""
        path = f"{self._path('mi')}/{self.name}?fieldValidation=Strict"
        await self._request("PATCH", path, {"spec": dict(spec)}, MERGE)

    async def get(self, kind: str, name: str = "", *, selector: str = "") -> Json:
        """An object, or the list of those with these labels. Raises RequestRefusedError."""
        words = f"/{name}" if name else f"?labelSelector={quote(selector)}"
        return await self._request("GET", f"{self._path(kind)}{words}")

    async def look(self, kind: str, name: str = "") -> Json | None:
        """An object, or the list of objects with the resource's label; None if it does not exist."""
        query = f"/{name}" if name else f"?labelSelector=inference.megatron.dev%2Fname%3D{self.name}"
        return await asyncio.to_thread(self.cluster.read, f"{self._path(kind)}{query}")

    def _path(self, kind: str) -> str:
        prefix, plural = PATHS[kind]
        return f"{prefix}/namespaces/{self.namespace}/{plural}"

    async def _request(self, *words: Any) -> Json:
        return await asyncio.to_thread(self.cluster.request, *words)

    async def events(self, *expected: str) -> list[Json]:
        """The events in the namespace, once these reasons are among them; the operator writes events after a status."""

        async def look() -> list[Json]:
            return list((await self.get("events"))["items"])

        def reasons(found: list[Json]) -> Counter[str]:
            return Counter(event["reason"] for event in found)

        wanted = Counter(expected)
        return await _poll(
            *(look, lambda found: reasons(found) >= wanted),
            lambda found: f"events {expected}; there are: {reasons(found)}",
            20,
        )

    async def status(self) -> Json:
        found = await self.look("mi", self.name)
        assert found is not None, f"{self.name} is not in {self.namespace}"
        return dict(found.get("status") or {})

    async def pods(self) -> dict[str, Json]:
        """The pods by name, including terminating ones."""
        found = await self.look("pods") or {}
        return {pod["metadata"]["name"]: pod for pod in found["items"]}

    async def until(self, is_so: Callable[[Json], bool], what: str, within: float = 60) -> Json:
        """The status as soon as the condition holds."""
        return await _poll(self.status, is_so, lambda status: f"{what}; status: {json.dumps(status, indent=1)}", within)

    async def until_phase(self, phase: str, within: float = 60) -> Json:
        return await self.until(lambda status: status.get("phase") == phase, f"phase {phase}", within)

    async def until_pods(self, *names: str, within: float = 60) -> dict[str, Json]:
        """Waits until exactly these pods exist."""
        return await _poll(
            self.pods,
            lambda pods: set(pods) == set(names),
            lambda pods: f"pods {names}; there are: {list(pods)}",
            within,
        )

    async def until_found(self, kind: str, name: str, is_so: Callable[[Json], bool], within: float = 60) -> Json:
        """The object as soon as it exists and the condition holds."""

        async def look() -> Json:
            return await self.look(kind, name) or {}

        return await _poll(
            look,
            lambda found: bool(found) and is_so(found),
            lambda found: f"{kind} {name}; it is: {json.dumps(found, indent=1) if found else 'not there'}",
            within,
        )

    async def until_gone(self, *kinds: str, within: float = 60) -> None:
        """Waits until no object of these kinds has the resource's label."""

        async def look() -> list[str]:
            found = [(kind, await self.look(kind) or {}) for kind in kinds]
            return [f"{kind}/{each['metadata']['name']}" for kind, listed in found for each in listed.get("items", [])]

        await _poll(look, lambda left: not left, lambda left: f"these to go: {left}", within)


async def _poll(
    look: Callable[[], Awaitable[T]], is_so: Callable[[T], bool], describe: Callable[[T], str], within: float
) -> T:
    """The result of ``look`` as soon as the condition holds. Raises NotReadyError with the last result.

    The longer it waits, the less often it looks: ten looks a second take 4 % of a core.
    """
    began = time.monotonic()
    while not is_so(found := await look()):
        waited = time.monotonic() - began
        if waited > within:
            raise NotReadyError(f"timeout after {within:.0f} s: waited for {describe(found)}")
        await asyncio.sleep(min(0.1 + waited / 20, 0.5))
    return found


def condition(status: Mapping[str, Any], kind: str) -> Json:
    """The condition of this type; empty if there is none."""
    found: Json = next((each for each in status.get("conditions", []) if each["type"] == kind), {})
    return found


def reason(status: Mapping[str, Any], kind: str = "Ready") -> str:
    return str(condition(status, kind).get("reason"))
