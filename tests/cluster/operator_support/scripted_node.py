"""A simulated node whose pods become ready by themselves, or are controlled by the test."""

import base64
import json
import secrets
from typing import Any

from operator_support.api import Api, Json
from operator_support.node import SimulatedNode, now
from operator_support.simulated_launcher import SimulatedLauncher

CONTAINER = "megatron"
LABELS = "inference.megatron.dev"
DOWNLOAD = f"{LABELS}/model-cache"
"""Label of pods that fill a model cache."""


class ScriptedNode(SimulatedNode):
    """With ``by_itself`` every pod becomes ready; otherwise it waits for ``run`` and ``make_ready``.

    ``address`` is for tests of a single pod that the API server connects to, which is not possible on loopback.
    """

    def __init__(self, api: Api, namespace: str, *, by_itself: bool = True, address: str | None = None) -> None:
        super().__init__(api, namespace)
        self._address = address
        self.by_itself = by_itself
        self.full = False
        self.refused: set[str] = set()  # names of pods that do not fit on this node
        self.launchers: dict[str, SimulatedLauncher] = {}

    async def start(self, pod: Json) -> None:
        if self.by_itself and DOWNLOAD in pod["metadata"]["labels"]:
            await self.end_download(pod, 0, {"bytes": 1000, "commit": "c0ffee"})
        elif self.by_itself:
            await self.run(pod)
            await self.make_ready(pod)

    async def stop(self, pod: Json, grace_seconds: float) -> None:  # noqa: ARG002  # ends at once
        if (launcher := self.launchers.pop(pod["metadata"]["name"], None)) is not None:
            await launcher.stop()

    async def close(self) -> None:
        for launcher in list(self.launchers.values()):
            await launcher.stop()

    def fits(self, pod: Json) -> bool:
        return not self.full and pod["metadata"]["name"] not in self.refused

    async def pod(self, name: str) -> Json:
        return await self.api.get(f"{self.pods_path}/{name}")

    async def run(self, pod: Json) -> SimulatedLauncher:
        """Starts the pod's process: its control API answers, and its rank loads."""
        metadata = pod["metadata"]
        environment = {item["name"]: item.get("value", "") for item in pod["spec"]["containers"][0]["env"]}
        launcher = SimulatedLauncher(
            self._address or _an_address(),
            await self._token(metadata["labels"][f"{LABELS}/name"]),
            leader=environment["MEGATRON_LEADER"] == "1",
            epoch=int(environment["MEGATRON_LEADER_EPOCH"]),
            group=int(environment["MEGATRON_REPLICA_GROUP"]),
            lifecycle=environment["MEGATRON_LIFECYCLE"],
        )
        await launcher.start()
        self.launchers[metadata["name"]] = launcher
        launcher.load(10, 100)
        await self._report(pod, launcher.address, ready=False)
        return launcher

    async def make_ready(self, pod: Json) -> None:
        """Finishes loading; the readiness probe passes."""
        launcher = self.launchers[pod["metadata"]["name"]]
        launcher.serve()
        await self._report(pod, launcher.address, ready=True)

    async def fail(self, pod: Json, exit_code: int, message: str | dict[str, Any], reason: str = "Error") -> None:
        """Ends the container, with the launcher's termination message."""
        await self.stop(pod, 0)
        words = message if isinstance(message, str) else json.dumps(message)
        ended = {"exitCode": exit_code, "reason": reason, "message": words, "finishedAt": now()[:19] + "Z"}
        status = {"name": CONTAINER, "image": "", "imageID": "", "ready": False, "restartCount": 0}
        await self.report(
            pod,
            {
                "phase": "Failed",
                "conditions": [{"type": "Ready", "status": "False", "reason": "PodFailed"}],
                "containerStatuses": [{**status, "state": {"terminated": ended}}],
            },
        )

    async def end_download(self, pod: Json, exit_code: int, message: dict[str, Any]) -> None:
        """Ends a pod that fills a model cache, with its termination message."""
        phase, reason = ("Failed", "Error") if exit_code else ("Succeeded", "Completed")
        ended = {"exitCode": exit_code, "reason": reason, "message": json.dumps(message)}
        status = {"name": CONTAINER, "image": "", "imageID": "", "ready": False, "restartCount": 0}
        await self.report(pod, {"phase": phase, "containerStatuses": [{**status, "state": {"terminated": ended}}]})

    async def preempt(self, pod: Json) -> None:
        """Ends the pod as the kubelet does for a pod with a higher priority."""
        await self.stop(pod, 0)
        words = {"reason": "TerminationByKubelet", "message": "Preempted in order to admit critical pod"}
        target = {"type": "DisruptionTarget", "status": "True", "lastTransitionTime": now()[:19] + "Z", **words}
        ready = {"type": "Ready", "status": "False", "lastTransitionTime": now()[:19] + "Z"}
        await self.report(
            pod,
            {"phase": "Failed", "reason": "Preempting", "message": words["message"], "conditions": [ready, target]},
        )

    async def wait_for_image(self, pod: Json, message: str) -> None:
        """Reports that the image cannot be pulled."""
        waiting = {"waiting": {"reason": "ImagePullBackOff", "message": message}}
        image = pod["spec"]["containers"][0]["image"]
        status = {"name": CONTAINER, "image": image, "imageID": "", "ready": False, "restartCount": 0}
        await self.report(pod, {"phase": "Pending", "containerStatuses": [{**status, "state": waiting}]})

    async def find_no_place(self, pod: Json, message: str) -> None:
        """Reports that no node fits the pod, as a scheduler does."""
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        await self.report(pod, {"phase": "Pending", "conditions": [condition]})

    async def _report(self, pod: Json, address: str, *, ready: bool) -> None:
        condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": now()[:19] + "Z"}
        running = {"running": {"startedAt": now()[:19] + "Z"}}
        container = {"name": CONTAINER, "image": "", "imageID": "", "ready": ready, "restartCount": 0, "state": running}
        await self.report(
            pod,
            {
                "phase": "Running",
                "podIP": address,
                "podIPs": [{"ip": address}],
                "conditions": [condition],
                "containerStatuses": [container],
            },
        )

    async def _token(self, resource: str) -> str:
        secret = await self.api.get(f"/api/v1/namespaces/{self.namespace}/secrets/{resource}-keys")
        return base64.b64decode(secret["data"]["control-token"]).decode()


def _an_address() -> str:
    return f"127.{128 + secrets.randbelow(100)}.{secrets.randbelow(256)}.{1 + secrets.randbelow(254)}"
