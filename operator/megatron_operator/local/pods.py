"""Pods as processes: the part of the kubelet on this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from megatron_operator.local.addresses import LoopbackAddresses
from megatron_operator.local.network import Endpoint, LoopbackNetwork
from megatron_operator.local.pod_manifest import (
    PathMap,
    PodMetadata,
    SecretReader,
    container_ports,
    main_container,
    read_launch,
    volume_paths,
)
from megatron_operator.local.pod_status import PodStatus
from megatron_operator.local.process_pod import TERMINATION_LOG, ProcessPod

USUAL_TERMINATION_PATH = "/dev/termination-log"
"""Default path of a container's termination message."""


def no_secrets(_namespace: str, name: str) -> Mapping[str, str]:
    """A reader for pods without Secrets."""
    raise KeyError(name)


class ProcessPods:
    """Runs Pod manifests as process groups with one loopback address each. Requires a running event loop.

    Supported are one container with a command, variables (values, Secrets, the downward API), HTTP probes, emptyDir,
    hostPath and secret volumes, a termination message and a grace period. Images, resources and security contexts are
    ignored. Names of Services that were applied to ``network`` resolve to loopback addresses.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        base_env: Mapping[str, str] | None = None,
        paths: PathMap | None = None,
        read_secret: SecretReader = no_secrets,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """``folder`` holds logs and volumes; by default a temporary one, which ``close`` removes."""
        self._owned_folder = None if folder else Path(tempfile.mkdtemp(prefix="megatron-pods-"))
        self.folder: Path = folder or Path(str(self._owned_folder))
        self._base_env = dict(os.environ if base_env is None else base_env)
        self._paths = paths or PathMap()
        self._read_secret = read_secret
        self._on_change = on_change
        self._pods: dict[tuple[str, str], ProcessPod] = {}
        self._runs: dict[tuple[str, str], asyncio.Task[None]] = {}
        # Probes must not use a proxy of the environment.
        self._client = httpx.AsyncClient(trust_env=False)
        self.network = LoopbackNetwork(LoopbackAddresses(), self._endpoints)

    def start(self, manifest: Mapping[str, Any]) -> PodStatus:
        """Start the pod and return at once. An existing pod of that name is left as it is.

        Raises PodError for a manifest that cannot run as a process, NoAddressError when no address has the ports free.
        """
        identity = PodMetadata.of(manifest, str(uuid.uuid4()))
        key = (identity.namespace, identity.name)
        if key in self._pods:
            return self._pods[key].status()
        container = main_container(manifest)
        folder = self.folder / identity.namespace / identity.name
        folder.mkdir(parents=True, exist_ok=True)
        address = self.network.pod_address(identity, container_ports(container))
        try:
            self._pods[key] = self._make(manifest, identity, address, folder)
        except Exception:
            self.network.forget_pod(identity, address)
            raise
        self._runs[key] = asyncio.create_task(self._pods[key].run(), name=f"pod {identity.name}")
        return self._pods[key].status()

    async def stop(self, name: str, grace_seconds: float | None = None, namespace: str = "default") -> None:
        """Delete the pod: end its process within the grace period (default: the manifest's). A missing pod is fine."""
        key = (namespace, name)
        pod = self._pods.get(key)
        if pod is None:
            return
        pod.end(pod.identity.grace_seconds if grace_seconds is None else grace_seconds)
        run = self._runs[key]
        await asyncio.wait([run])
        if self._pods.get(key) is pod:
            self.network.forget_pod(pod.identity, pod.status().address)
            del self._pods[key], self._runs[key]
            self._on_change()
        run.result()

    def relabel(
        self, name: str, uid: str, changes: Mapping[str, Mapping[str, str]], namespace: str = "default"
    ) -> None:
        """Change ``labels`` and ``annotations`` of this pod. A missing or replaced pod is success."""
        pod = self._pods.get((namespace, name))
        if pod is not None and pod.identity.uid == uid:
            pod.relabel(changes.get("labels") or {}, changes.get("annotations") or {})

    def statuses(self) -> list[PodStatus]:
        """All pods that are not deleted yet, oldest first."""
        return [pod.status() for pod in self._pods.values()]

    def status(self, name: str, namespace: str = "default") -> PodStatus | None:
        """One pod; None when it does not exist."""
        pod = self._pods.get((namespace, name))
        return pod.status() if pod else None

    def kill(self) -> None:
        """Kill all processes. ``close`` is still required."""
        for pod in self._pods.values():
            pod.kill()

    async def close(self, grace_seconds: float | None = None) -> None:
        """Delete all pods and Services; returns when all processes are gone."""
        await asyncio.gather(*(self.stop(name, grace_seconds, namespace) for namespace, name in list(self._pods)))
        await self.network.close()
        await self._client.aclose()
        if self._owned_folder:
            shutil.rmtree(self._owned_folder, ignore_errors=True)

    def _make(self, manifest: Mapping[str, Any], identity: PodMetadata, address: str, folder: Path) -> ProcessPod:
        container = main_container(manifest)
        paths = volume_paths(manifest, folder, self._read_secret, self._paths)
        launch = read_launch(
            manifest,
            identity,
            address,
            base_env=self._base_env,
            paths=paths.plus(container.get("terminationMessagePath", USUAL_TERMINATION_PATH), folder / TERMINATION_LOG),
            read_secret=self._read_secret,
            resolve_hosts=self.network.resolve,
        )
        return ProcessPod(identity, container, launch, address, folder, self._client, self._on_change)

    def _endpoints(self) -> Iterator[Endpoint]:
        for pod in self._pods.values():
            status = pod.status()
            if status.pid is not None and not status.finished:
                yield Endpoint(status.namespace, status.labels, status.address, status.ready, pod.named_ports)
