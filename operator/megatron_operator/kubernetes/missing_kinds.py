"""Optional kinds: kinds that a cluster may not have, or not yet.

After a kind was found missing, one periodic check serves all resources that wait for it. A kind that exists is watched.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import Awaitable, Callable

from megatron_operator import names
from megatron_operator.kubernetes.api_server import ApiServer, ServerError, group_version_plural
from megatron_operator.observed_state import ActionRefused, AdapterError, KindMissing

FIRST_PAUSE = 5.0
LONGEST_PAUSE = 60.0
"""Seconds between checks for missing kinds, growing from the first value to the second."""

OTHER_GANG = "or set spec.scheduling.gang to another value"
FIXES = {
    "HTTPRoute": "install the Gateway API, version 1.2 or newer, with a gateway that implements it, or remove"
    " spec.expose.httpRoute",
    "InferencePool": "install the Gateway API Inference Extension, version 1.0 or newer, with a gateway that implements"
    " it, or remove spec.expose.inferencePool",
    names.POD_GROUP: "upgrade Kubernetes to 1.36 or newer and enable its feature gates GenericWorkload and"
    f" GangScheduling, {OTHER_GANG}",
    names.SCHEDULER_PLUGINS_POD_GROUP: f"install scheduler-plugins with its plugin Coscheduling, {OTHER_GANG}",
    names.VOLCANO_POD_GROUP: f"install Volcano, {OTHER_GANG}",
    "Ingress": "upgrade Kubernetes to 1.19 or newer, or remove spec.expose.ingress",
}

UNDECLARED = "field not declared in schema"
"""Part of the API server's error, with status 500, about a field that the CRD does not have."""

Wake = Callable[[], None]
Watch = Callable[[str], Awaitable[None]]


class MissingKinds:
    """The missing kinds of one cluster. ``close`` ends the checks."""

    def __init__(self, api: ApiServer, watch: Watch) -> None:
        """``watch`` is called with each kind that has an object; it may be watched already."""
        self._api = api
        self._watch = watch
        self._waiting: dict[str, set[Wake]] = {}
        self._task: asyncio.Task[None] | None = None

    def is_missing(self, kind: str) -> bool:
        """Whether the kind is known to be missing; sends no request."""
        return kind in self._waiting

    def check(self, kind: str, wake: Wake) -> None:
        """Raises KindMissing for a kind known to be missing, and calls ``wake`` when the cluster has it."""
        if kind in self._waiting:
            self._waiting[kind].add(wake)
            group, version, _ = group_version_plural(kind)
            raise KindMissing(f"{kind}: this cluster has no such kind in {group}/{version}; {FIXES[kind]}")

    async def explain(self, kind: str, error: ServerError, wake: Wake) -> None:
        """Raises KindMissing when the error means a missing kind, ActionRefused when its CRD is too old."""
        if kind not in FIXES:
            return
        if UNDECLARED in str(error):
            raise ActionRefused(f"{error}; {FIXES[kind]}") from error
        if error.status == http.HTTPStatus.NOT_FOUND and not await self._api.knows(kind):
            self._waiting.setdefault(kind, set())
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._look(), name="check for missing kinds")
            self.check(kind, wake)

    async def found(self, kind: str) -> None:
        """An object of the kind exists: watch the kind, if it is a kind of routes."""
        if kind in names.ROUTE_KINDS:
            await self._watch(kind)

    def forget(self, wake: Wake) -> None:
        """Remove a ``wake`` callback."""
        for waiting in self._waiting.values():
            waiting.discard(wake)

    async def close(self) -> None:
        """End the checks."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _look(self) -> None:
        """Check until no resource waits."""
        pause = FIRST_PAUSE
        while self._waiting:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            for kind in list(self._waiting):
                if not self._waiting[kind] or await self._has(kind):
                    for wake in self._waiting.pop(kind):
                        wake()

    async def _has(self, kind: str) -> bool:
        try:
            return await self._api.knows(kind)
        except AdapterError:
            return False
