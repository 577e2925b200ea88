"""A simulated node: it runs every pod of one namespace and reports its status."""

import asyncio
import contextlib
import uuid
from abc import ABC, abstractmethod
from datetime import UTC, datetime
from typing import Any, Self

from operator_support.api import Api, ApiFailure, Json

HEARTBEAT = 5.0
TURN = 0.1
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def is_deleted(pod: Json) -> bool:
    return "deletionTimestamp" in pod["metadata"]


class SimulatedNode(ABC):
    """An asynchronous context manager. Subclasses define the behavior of pods.

    There is no scheduler: the node binds the pods to itself, so that deletions have their grace period.
    """

    def __init__(self, api: Api, namespace: str) -> None:
        self.api = api
        self.namespace = namespace
        self.name = f"node-{uuid.uuid4().hex[:8]}"
        self.pods_path = f"/api/v1/namespaces/{namespace}/pods"
        self.failure: BaseException | None = None
        self._changed = asyncio.Event()
        """Something may have happened to the pods since the last look."""
        self._known: dict[str, Json] = {}
        self._endings: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        await self._register()
        self._tasks = [asyncio.create_task(each) for each in (self._watch(), self._turns(), self._beat())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in [*self._tasks, *self._endings.values()]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._endings.values(), return_exceptions=True)
        await self.close()
        await self.api.delete(f"{LEASES}/{self.name}")
        await self.api.delete(f"/api/v1/nodes/{self.name}")
        if self.failure is not None:
            raise self.failure

    @abstractmethod
    async def start(self, pod: Json) -> None:
        """Starts a pod that was bound to this node."""

    @abstractmethod
    async def stop(self, pod: Json, grace_seconds: float) -> None:
        """Ends the pod; returns when it has ended. The pod may never have been started."""

    def relabel(self, pod: Json) -> None:  # noqa: B027
        """Called when the pod's labels may have changed."""

    async def turn(self) -> None:  # noqa: B027  # optional
        """Called periodically."""

    async def close(self) -> None:  # noqa: B027
        """Ends everything."""

    async def report(self, pod: Json, status: dict[str, Any]) -> None:
        """Writes the pod's status; the pod may have been deleted."""
        with contextlib.suppress(ApiFailure):
            await self.api.merge(f"{self.pods_path}/{pod['metadata']['name']}/status", {"status": status})

    def fits(self, pod: Json) -> bool:  # noqa: ARG002
        """Whether the pod fits on this node."""
        return True

    async def _register(self) -> None:
        await self.api.post("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.name}})
        ready = {"type": "Ready", "status": "True", "reason": "Played", "lastHeartbeatTime": now()[:19] + "Z"}
        await self.api.merge(f"/api/v1/nodes/{self.name}/status", {"status": {"conditions": [ready]}})
        spec = {"holderIdentity": self.name, "leaseDurationSeconds": 40, "renewTime": now()}
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self.name}}
        await self.api.post(LEASES, {**lease, "spec": spec})

    async def _beat(self) -> None:
        """Heartbeats, without which the cluster would consider the node lost and its pods unready after 40 seconds."""
        while True:
            await asyncio.sleep(HEARTBEAT)
            with contextlib.suppress(Exception):  # a test may stop the API server
                await self.api.merge(f"{LEASES}/{self.name}", {"spec": {"renewTime": now()}})

    async def _watch(self) -> None:
        """The watch only says when to look: a list at each turn would take several percent of a core."""
        while True:
            with contextlib.suppress(Exception):  # a test may stop the API server
                async for _ in self.api.changes(self.pods_path):
                    self._changed.set()
            self._changed.set()
            await asyncio.sleep(TURN)

    async def _turns(self) -> None:
        self._changed.set()
        while True:
            try:
                if self._changed.is_set():
                    self._changed.clear()
                    await self._look()
                await self.turn()
            except ApiFailure:
                self._changed.set()  # a race with a deletion
            except OSError:
                self._changed.set()  # the test has stopped the API server
            except Exception as error:
                self.failure = error
                raise
            await asyncio.sleep(TURN)

    async def _look(self) -> None:
        pods = {pod["metadata"]["uid"]: pod for pod in await self.api.items(self.pods_path)}
        for uid, pod in pods.items():
            if is_deleted(pod):
                self.relabel(pod)
                self._end(uid, pod)
            elif uid in self._known:
                self.relabel(pod)
            elif self.fits(pod):
                self._known[uid] = pod
                await self._bind(pod)
                await self._start(pod)
            else:
                self._changed.set()  # it may fit at the next look
        for uid in self._known.keys() - pods.keys() - self._endings.keys():
            await self.stop(self._known.pop(uid), 0)

    async def _start(self, pod: Json) -> None:
        """Starts a pod; an error of the test is also written into the pod's status, to show it where the test waits."""
        try:
            await self.start(pod)
        except Exception as error:
            await self.report(pod, {"phase": "Failed", "reason": "TestFailed", "message": repr(error)})
            raise

    async def _bind(self, pod: Json) -> None:
        name = pod["metadata"]["name"]
        target = {"apiVersion": "v1", "kind": "Node", "name": self.name}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        await self.api.post(f"{self.pods_path}/{name}/binding", binding)

    def _end(self, uid: str, pod: Json) -> None:
        if uid not in self._endings:
            self._endings[uid] = asyncio.create_task(self._finish(uid, pod))

    async def _finish(self, uid: str, pod: Json) -> None:
        await self.stop(pod, pod["metadata"].get("deletionGracePeriodSeconds") or 0)
        path = f"{self.pods_path}/{pod['metadata']['name']}"
        await self.api.delete(path, gracePeriodSeconds=0, preconditions={"uid": uid})
        self._known.pop(uid, None)
