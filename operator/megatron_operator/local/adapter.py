"""The adapter's ``ClusterAdapter``: pods are processes, Services are loopback addresses."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_operator import names
from megatron_operator.api.v1alpha1 import Cache
from megatron_operator.control_client import ControlClient
from megatron_operator.failures import read_failure
from megatron_operator.local.addresses import NoAddressError
from megatron_operator.local.model_cache import job_pod, observed_download, with_local_cache
from megatron_operator.local.pod_manifest import PathMap, PodError
from megatron_operator.local.pod_status import PodStatus
from megatron_operator.local.pods import ProcessPods
from megatron_operator.observation import Answer, ControlApiPoller, observed_state
from megatron_operator.observed_state import (
    Action,
    ActionRefused,
    AdapterError,
    ApplyChild,
    CreatePod,
    CreateSecret,
    DeleteChild,
    DeletePod,
    Manifest,
    ObservedPod,
    ObservedState,
    PodPhase,
    SendRole,
    SendSignal,
    SetRoleLabel,
)
from megatron_operator.render.command import CACHE_MOUNT

USUAL_ADDRESS = "127.0.0.1"
"""Address of the HTTP Service, if its port is free there."""
NODE = "localhost"
LOCAL_RANKS = "MEGATRON_LOCAL_RANKS"
INHERITED = "MEGATRON_CACHE_DIR"
"""The only MEGATRON_ variable that pods inherit; the others identify a pod."""


class LocalAdapter:
    """The ``ClusterAdapter`` of one resource on this machine. ``close`` ends all processes that it started."""

    def __init__(
        self,
        folder: Path,
        *,
        paths: PathMap | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """``folder`` holds the logs; ``on_change`` is called when a pod has changed."""
        self.pods = ProcessPods(
            folder,
            base_env=_base_environment(),
            paths=(paths or PathMap()).plus(CACHE_MOUNT, _hub_cache()),
            read_secret=self._read_secret,
            on_change=on_change,
        )
        self._secrets: dict[str, Mapping[str, str]] = {}
        self.local_ranks = 1
        """Total number of ranks of all pods."""
        self.obstacle: AdapterError | None = None
        """Why the last child could not be created: ActionRefused for an error in the resource."""
        self._children: dict[str, str] = {}
        self._clients: dict[str, ControlClient] = {}
        self._poller = ControlApiPoller(on_change)
        self._deletions: set[asyncio.Task[None]] = set()

    async def observe(self, name: str, namespace: str, cache: Cache | None = None) -> ObservedState:  # noqa: ARG002
        """Polls all running pods. A pod that does not answer is observed without a report."""
        statuses, downloads = self._statuses(name, namespace), self._downloads(name, namespace)
        await self._poller.keep_only({status.uid for status in [*statuses, *downloads]})
        answers = await asyncio.gather(*(self._report(name, each) for each in statuses))
        observed = self._seen(name, namespace, statuses, answers)
        told = await asyncio.gather(*(self._report(name, each) for each in downloads))
        return replace(observed, downloads=tuple(map(observed_download, downloads, told)))

    def observe_without_polling(self, name: str, namespace: str) -> ObservedState:
        """The same without polling."""
        statuses = self._statuses(name, namespace)
        return self._seen(name, namespace, statuses, [None] * len(statuses))

    def add_secrets(self, secrets: Mapping[str, Mapping[str, str]]) -> None:
        """Set the Secrets that the user wrote, by name. Pods that start later use the new values."""
        self._secrets.update({name: dict(values) for name, values in secrets.items()})

    async def dropped_fields(self, pod: Manifest, override: Manifest) -> Mapping[str, Any]:  # noqa: ARG002
        """None: there is no API server."""
        return {}

    async def apply(self, name: str, namespace: str, action: Action) -> None:
        """Raises ActionRefused when a manifest cannot run here, AdapterError when a retry may help."""
        match action:
            case ApplyChild(manifest):
                await self._apply_child(manifest)
            case DeleteChild(kind, child):
                self._children.pop(f"{kind}/{child}", None)
                if kind == names.JOB:
                    await self.pods.stop(child, 0, namespace)
            case CreateSecret(manifest, random_keys):
                values = {key: secrets.token_urlsafe(32) for key in random_keys}
                self._secrets.setdefault(manifest["metadata"]["name"], values)
                self._remember(manifest)
            case CreatePod(manifest):
                self._create_pod(manifest)
            case DeletePod(pod, uid, grace_seconds):
                self._delete_pod(namespace, pod, uid, grace_seconds)
            case SendSignal(signal, address):
                await self._client(name).signal(address, signal)
            case SetRoleLabel(pod, uid, leader, epoch):
                self.pods.relabel(pod, uid, names.role_metadata(leader, epoch), namespace)
            case SendRole(address, leader, epoch, lifecycle):
                await self._client(name).set_role(address, leader=leader, epoch=epoch, lifecycle=lifecycle)

    async def close(self) -> None:
        """End all pods within the grace periods of their manifests, then close the rest."""
        await self.pods.close()
        await asyncio.gather(*self._deletions)
        await self._poller.close()
        for client in self._clients.values():
            await client.close()

    def _statuses(self, name: str, namespace: str) -> list[PodStatus]:
        return self._labelled(names.NAME_LABEL, name, namespace)

    def _downloads(self, name: str, namespace: str) -> list[PodStatus]:
        """The pods of download Jobs."""
        return self._labelled(names.CACHE_LABEL, name, namespace)

    def _labelled(self, label: str, value: str, namespace: str) -> list[PodStatus]:
        return [
            status
            for status in self.pods.statuses()
            if status.namespace == namespace and status.labels.get(label) == value
        ]

    def _seen(
        self, name: str, namespace: str, statuses: Sequence[PodStatus], answers: Sequence[Answer]
    ) -> ObservedState:
        seen = zip(map(_observed, statuses), answers, strict=True)
        return observed_state(seen, dict(self._children), cache_nodes=(NODE,), url=self._url(name, namespace))

    def _read_secret(self, _namespace: str, name: str) -> Mapping[str, str]:
        return self._secrets[name]

    def _client(self, name: str) -> ControlClient:
        if name not in self._clients:
            token = self._secrets.get(names.keys_secret(name), {}).get(names.CONTROL_TOKEN)
            self._clients[name] = ControlClient(token)
        return self._clients[name]

    async def _report(self, name: str, status: PodStatus) -> Answer:
        if status.phase is not PodPhase.RUNNING:
            return None
        return await self._poller.poll(self._client(name), status.uid, status.address)

    async def _apply_child(self, manifest: Manifest) -> None:
        if manifest["kind"] == "Service":
            headless = manifest["spec"].get("clusterIP") == "None"
            with self._as_adapter_error(f"Service {manifest['metadata']['name']}"):
                await self.pods.network.apply_service(manifest, None if headless else USUAL_ADDRESS)
        if manifest["kind"] == names.JOB:
            self._create_pod(job_pod(manifest))
        self._remember(manifest)

    def _remember(self, manifest: Manifest) -> None:
        self._children[names.child_key(manifest)] = names.applied_hash(manifest["metadata"])

    def _create_pod(self, manifest: Manifest) -> None:
        with self._as_adapter_error(f"pod {manifest['metadata']['name']}"):
            self.pods.start(with_local_cache(self._with_local_ranks(manifest)))

    @contextlib.contextmanager
    def _as_adapter_error(self, child: str) -> Iterator[None]:
        """Convert errors to those of the protocol, and record the last one; a success clears it."""
        self.obstacle = None
        try:
            yield
        except PodError as error:
            self.obstacle = ActionRefused(f"{child}: {error}")
        except (NoAddressError, OSError) as error:
            self.obstacle = AdapterError(f"{child}: {error}")
        if self.obstacle is not None:
            raise self.obstacle

    def _with_local_ranks(self, manifest: Manifest) -> Manifest:
        """Set the number of ranks on this machine, whose cores they share."""
        spec = manifest["spec"]
        container = spec["containers"][0]
        variable = {"name": LOCAL_RANKS, "value": str(self.local_ranks)}
        first = {**container, "env": [*(container.get("env") or []), variable]}
        return {**manifest, "spec": {**spec, "containers": [first, *spec["containers"][1:]]}}

    def _delete_pod(self, namespace: str, name: str, uid: str, grace_seconds: int) -> None:
        status = self.pods.status(name, namespace)
        if status is None or status.uid != uid:
            return
        deletion = asyncio.create_task(self.pods.stop(name, grace_seconds, namespace), name=f"deletion of {name}")
        self._deletions.add(deletion)
        deletion.add_done_callback(self._deletions.discard)

    def _url(self, name: str, namespace: str) -> str | None:
        address = self.pods.network.service_address(namespace, names.http_service(name))
        return address and f"http://{address}:{names.HTTP_PORT}/v1"


def _base_environment() -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_") or name == INHERITED
    }
    # The programs of this environment take precedence, even if it was not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**inherited, "PATH": path, "PYTHONUNBUFFERED": "1"}


def _hub_cache() -> Path:
    """Downloads share the hub's cache of this machine."""
    with contextlib.suppress(KeyError):
        return Path(os.environ["HF_HOME"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"


def _observed(status: PodStatus) -> ObservedPod | None:
    identity = names.pod_identity({"labels": status.labels, "annotations": status.annotations})
    if identity is None:
        return None
    failed = status.finished and not status.deleting
    return ObservedPod(
        name=status.name,
        uid=status.uid,
        group=identity.group,
        attempt=identity.attempt,
        index=identity.index,
        leader=identity.leader,
        template_hash=identity.template_hash,
        phase=status.phase,
        ready=status.ready,
        created_at=status.created_at,
        restarts=identity.restarts,
        epoch=identity.epoch,
        address=status.address,
        node=NODE,
        cached_source=status.annotations.get(names.CACHED_SOURCE_ANNOTATION),
        default_image=status.annotations.get(names.DEFAULT_IMAGE_ANNOTATION),
        startup_since=status.started_at or status.created_at,
        ready_changed_at=status.ready_changed_at,
        finished_at=status.finished_at,
        deletion_deadline=status.deletion_deadline,
        failure=read_failure(status.exit_code, status.reason, status.message) if failed else None,
    )
