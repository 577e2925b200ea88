"""The cluster's DNS names and Services on the loopback interface."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_operator.local.addresses import LoopbackAddresses
from megatron_operator.local.pod_manifest import PodMetadata

CHUNK = 64 * 1024
CLUSTER_NAME = re.compile(
    r"(?<![\w.-])(?:([a-z0-9-]+)\.)?([a-z0-9-]+)\.([a-z0-9-]+)\.svc(?:\.[a-z0-9.-]*[a-z0-9])?(?![\w-])"
)


@dataclass(frozen=True)
class Endpoint:
    """A pod that a Service may select."""

    namespace: str
    labels: Mapping[str, str]
    address: str
    ready: bool
    named_ports: Mapping[str, int]


@dataclass(frozen=True)
class _Service:
    manifest: Mapping[str, Any]
    address: str
    servers: tuple[asyncio.Server, ...]


class LoopbackNetwork:
    """Gives every Service and pod an address, forwards connections to the pods that a Service selects, and resolves
    names."""

    def __init__(self, addresses: LoopbackAddresses, endpoints: Callable[[], Iterable[Endpoint]]) -> None:
        self._addresses = addresses
        self._endpoints = endpoints
        self._services: dict[tuple[str, str], _Service] = {}
        self._applying = asyncio.Lock()
        self._pod_addresses: dict[tuple[str, str, str], str] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._turns = itertools.count()

    async def apply_service(self, manifest: Mapping[str, Any], prefer: str | None = None) -> str:
        """Listen for the Service; returns its permanent address. Raises NoAddressError.

        ``prefer`` is used if its ports are free. A repeated call changes the selector, but not the ports.
        """
        key = _key(manifest)
        async with self._applying:
            known = self._services.get(key)
            if known is not None:
                self._services[key] = _Service(manifest, known.address, known.servers)
                return known.address
            ports = manifest["spec"]["ports"]
            address = self._addresses.take([int(port["port"]) for port in ports], prefer)
            servers = [await self._listen(key, address, port) for port in ports]
            self._services[key] = _Service(manifest, address, tuple(servers))
            return address

    async def close(self) -> None:
        """Close all Services and their connections."""
        for service in self._services.values():
            self._addresses.give_back(service.address)
            for server in service.servers:
                server.close()
        self._services.clear()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def service_address(self, namespace: str, name: str) -> str | None:
        """None for a Service that was not applied."""
        service = self._services.get((namespace, name))
        return service.address if service else None

    def pod_address(self, pod: PodMetadata, ports: Iterable[int]) -> str:
        """The address of a pod; the same that its name was resolved to earlier. Raises NoAddressError."""
        key = (pod.namespace, pod.subdomain, pod.hostname)
        if pod.subdomain and key in self._pod_addresses:
            return self._pod_addresses[key]
        address = self._addresses.take(ports)
        if pod.subdomain:
            self._pod_addresses[key] = address
        return address

    def forget_pod(self, pod: PodMetadata, address: str) -> None:
        """Release a pod's address."""
        self._pod_addresses.pop((pod.namespace, pod.subdomain, pod.hostname), None)
        self._addresses.give_back(address)

    def resolve(self, text: str) -> str:
        """``text`` with the cluster's names (``service.namespace.svc``, ``pod.service.namespace.svc``) replaced by
        addresses."""
        return CLUSTER_NAME.sub(self._address_of, text)

    def unknown_services(self, text: str) -> set[tuple[str, str]]:
        """Namespace and name of the Services in ``text`` that were not applied."""
        return {(space, name) for _, name, space in CLUSTER_NAME.findall(text)} - self._services.keys()

    def _address_of(self, match: re.Match[str]) -> str:
        host, name, namespace = match.groups()
        service = self._services.get((namespace, name))
        if service is None:
            return match[0]
        if host is None:
            return service.address
        key = (namespace, name, host)
        if key not in self._pod_addresses:  # a peer that has not started yet
            self._pod_addresses[key] = self._addresses.take(
                [int(port["port"]) for port in service.manifest["spec"]["ports"]]
            )
        return self._pod_addresses[key]

    async def _listen(self, key: tuple[str, str], address: str, port: Mapping[str, Any]) -> asyncio.Server:
        target = port.get("targetPort", port["port"])

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._connections.add(task)
            try:
                # `close` cancels this task. Python 3.11 would log that as an unhandled error.
                with contextlib.suppress(asyncio.CancelledError):
                    await self._forward(key, target, reader, writer)
            finally:
                writer.transport.abort()
                self._connections.discard(task)

        return await asyncio.start_server(forward, address, int(port["port"]))

    async def _forward(
        self, key: tuple[str, str], target: int | str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        pod = self._select(key)
        port = None if pod is None else int(target) if str(target).isdigit() else pod.named_ports.get(str(target))
        if pod is None or port is None:
            return
        try:
            there_reader, there_writer = await asyncio.open_connection(pod.address, port)
        except OSError:
            return
        try:
            await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer), return_exceptions=True)
        finally:
            there_writer.transport.abort()

    def _select(self, key: tuple[str, str]) -> Endpoint | None:
        service = self._services.get(key)
        if service is None:
            return None
        spec = service.manifest["spec"]
        wanted = (spec.get("selector") or {}).items()
        unready_too = spec.get("publishNotReadyAddresses", False)
        chosen = [
            pod
            for pod in self._endpoints()
            if pod.namespace == key[0] and wanted <= pod.labels.items() and (pod.ready or unready_too)
        ]
        if not chosen:
            return None
        # Ready pods take turns. Of unready pods the newest is used, since older ones are ending.
        return chosen[-1] if unready_too else chosen[next(self._turns) % len(chosen)]


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end of input, then close that direction. An error closes the connection."""
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
        return
    writer.transport.abort()


def _key(manifest: Mapping[str, Any]) -> tuple[str, str]:
    metadata = manifest["metadata"]
    return metadata.get("namespace", "default"), metadata["name"]
