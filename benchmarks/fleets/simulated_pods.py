"""Simulated pods: each runs as soon as it is created, and one server implements the control API of all launchers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Self

from aiohttp import web
from kubernetes.aio import client, watch
from operator_support.api import Api, ApiFailure

ADDRESS = "127.0.0.1"
CONTROL_PORT = 9000
NAME_LABEL = "inference.megatron.dev/name"
REPORT = {
    "revision": 1,
    "role": "leader",
    "epoch": 1,
    "engineState": "RUNNING",
    "replicaGroups": [{"index": 0, "state": "RUNNING"}],
    "ranks": [{"rank": 0, "phase": "Serving"}],
    "requests": {"running": 0, "waiting": 0},
    "ready": True,
}


class SimulatedPods:
    """An asynchronous context manager.

    Attributes:
        first_seen: When the first pod of each resource appeared, on the monotonic clock.
    """

    def __init__(self, api: Api, pods: client.CoreV1Api, namespace: str) -> None:
        self._api = api
        self._pods = pods
        self._namespace = namespace
        self.first_seen: dict[str, float] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/v1/state", self._state)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, ADDRESS, CONTROL_PORT).start()
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        self._watching.cancel()
        await asyncio.gather(self._watching, *self._running, return_exceptions=True)
        await self._runner.cleanup()

    async def _state(self, request: web.Request) -> web.Response:
        """A request for the next change waits until the end, because the state never changes."""
        if "after" in request.query:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(float(request.query["timeout"])):
                    await self._over.wait()
        return web.json_response(REPORT)

    async def _watch(self) -> None:
        while True:
            async with watch.Watch() as events:
                async for event in events.stream(self._pods.list_namespaced_pod, self._namespace):
                    if event["type"] == "ADDED":
                        self._add(event["raw_object"]["metadata"])

    def _add(self, pod: Mapping[str, Any]) -> None:
        self.first_seen.setdefault(pod["labels"][NAME_LABEL], time.perf_counter())
        task = asyncio.create_task(self._run(pod["name"]))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, name: str) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        status = {
            "phase": "Running",
            "podIP": ADDRESS,
            "podIPs": [{"ip": ADDRESS}],
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": now}],
        }
        with contextlib.suppress(ApiFailure):  # already deleted
            await self._api.merge(f"/api/v1/namespaces/{self._namespace}/pods/{name}/status", {"status": status})
