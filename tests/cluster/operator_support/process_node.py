"""A node that runs its pods as processes of this machine, with the real runtime."""

import asyncio
import base64
import json
import os
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from operator_support.api import Api, Json
from operator_support.kubelet_status import kubelet_status
from operator_support.node import SimulatedNode

from megatron_operator.local.pod_manifest import PathMap
from megatron_operator.local.pod_status import PodStatus
from megatron_operator.local.pods import ProcessPods

CONTAINER = "megatron"


class ProcessNode(SimulatedNode):
    """``models`` is the folder /models of pods. Services get loopback addresses, which pods resolve at their start."""

    def __init__(self, api: Api, namespace: str, folder: Path, models: Path) -> None:
        super().__init__(api, namespace)
        # The programs of this Python environment, even if it is not activated.
        path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
        self.processes = ProcessPods(
            folder,
            base_env={**os.environ, "PATH": path},
            paths=PathMap().plus("/models", models),
            read_secret=self._read_secret,
        )
        self._secrets: dict[str, Mapping[str, str]] = {}
        self._pods: dict[str, Json] = {}
        self._reported: dict[str, PodStatus] = {}

    async def start(self, pod: Json) -> None:
        await self._learn()
        # A process gets addresses instead of names at its start, whereas a real pod resolves names again.
        while self.processes.network.unknown_services(json.dumps(pod["spec"])):
            await asyncio.sleep(0.1)
            await self._learn()
        self._pods[pod["metadata"]["uid"]] = pod
        self.processes.start(pod)

    async def stop(self, pod: Json, grace_seconds: float) -> None:
        await self.processes.stop(pod["metadata"]["name"], grace_seconds, self.namespace)
        self._pods.pop(pod["metadata"]["uid"], None)

    def relabel(self, pod: Json) -> None:
        metadata = pod["metadata"]
        self.processes.relabel(metadata["name"], metadata["uid"], metadata, self.namespace)

    async def turn(self) -> None:
        for status in self.processes.statuses():
            if status.uid in self._pods and self._reported.get(status.uid) != status:
                self._reported[status.uid] = status
                await self.report(self._pods[status.uid], kubelet_status(status, CONTAINER))

    async def close(self) -> None:
        await self.processes.close(grace_seconds=10)

    async def service_address(self, name: str) -> str:
        """The address that forwards the Service's ports to its pods. The Service may be newer than the last pod."""
        await self._learn()
        address = self.processes.network.service_address(self.namespace, name)
        assert address is not None, f"there is no Service {name}"
        return address

    def _read_secret(self, _namespace: str, name: str) -> Mapping[str, str]:
        return self._secrets[name]

    async def _learn(self) -> None:
        """Reads the objects that the cluster's DNS and the kubelet's volume manager would use."""
        root = f"/api/v1/namespaces/{self.namespace}"
        for service in await self.api.items(f"{root}/services"):
            await self.processes.network.apply_service(service)
        for secret in await self.api.items(f"{root}/secrets"):
            values = {key: base64.b64decode(value).decode() for key, value in (secret.get("data") or {}).items()}
            self._secrets[secret["metadata"]["name"]] = values
